#!/bin/sh
# Starts the program of the same name in libexec/evenkeel, or prints which shared libraries this system lacks for it. In a
# tarball this script is bin/NAME, and share/evenkeel/packages.txt lists the packages with the libraries.
set -eu
built_on='@SYSTEM@'

self=$(readlink -f -- "$0")
name=${self##*/}
folder=${self%/bin/*}
program=$folder/libexec/evenkeel/$name

# The loader's lines: "libfirst.so.1 => not found", "program: /lib/libsecond.so.1: version `SECOND_2' not found (required by ...)".
lacking=$(LD_TRACE_LOADED_OBJECTS=1 "$program" 2>&1 | grep 'not found' || true)
[ -n "$lacking" ] || exec "$program" "$@"

has=$(sed -n 's/^PRETTY_NAME="\{0,1\}\([^"]*\)"\{0,1\}$/\1/p' /etc/os-release 2>/dev/null || true)
libraries=$(printf '%s\n' "$lacking" | sed -E 's/^[[:space:]]+//; s/ => not found.*//; s/^[^:]*: (\/[^:]*\/)?([^:]*): version `?([^'"'"']*).? not found.*/\2 with \3/
  s/^[^=]*: .*not found$/the dynamic loader of its programs/' |
  sort -u | paste -s -d ',' | sed 's/,/, /g')
if [ "$has" = "$built_on" ]; then
  packages=$(paste -s -d ' ' "$folder/share/evenkeel/packages.txt")
  advice="install the packages that evenkeel needs: apt-get install $packages"
else
  advice="it was built on $built_on, and this is ${has:-another system}. Use a tarball that was built on this system, or build evenkeel from the sources (share/doc/evenkeel/docs/install.md)"
fi
printf '%s: this system lacks %s; %s\n' "$name" "$libraries" "$advice" >&2
exit 1
