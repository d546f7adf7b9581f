// Displays the data of the page: that of a run (html_report.h) or a forecast. Every text of the
// data becomes a text node, so that none is read as HTML.
(() => {
  'use strict';
  const data = JSON.parse(document.getElementById('data').textContent);
  const known = (value) => value !== null && Number.isFinite(value);

  // Returns an element. Children are elements and texts; null and '' are left out.
  function h(tag, attributes, ...children) {
    const [name, ...classes] = tag.split('.');
    const element = document.createElement(name);
    if (classes.length > 0) element.className = classes.join(' ');
    for (const [key, value] of Object.entries(attributes)) {
      if (key === 'style') element.style.cssText = value; else element[key] = value;
    }
    element.append(...children.flat(2).filter((child) => child !== null && child !== ''));
    return element;
  }

  const count = (n) => Math.round(n).toLocaleString('en');
  const plural = (n, noun) => `${count(n)} ${noun}${n === 1 ? '' : 's'}`;
  const digits = (value, n) => (known(value) ? value.toFixed(n) : value);  // Or "inf".
  const percent = (share, n = 1) => (known(share) ? `${(100 * share).toFixed(n)} %` : '-');
  function number(value) {
    if (!known(value)) return '-';
    const amount = Math.abs(value);
    if (amount >= 999.5) return count(value);
    return amount < 1 && (amount >= 0.01 || amount === 0) ? value.toFixed(3) : value.toPrecision(3);
  }
  function size(bytes) {
    if (bytes < 1024) return `${bytes} B`;
    const units = ['KiB', 'MiB', 'GiB', 'TiB'];
    let value = bytes / 1024;
    while (value >= 1023.95 && units.length > 1) { value /= 1024; units.shift(); }
    return `${value.toFixed(value >= 99.95 ? 0 : 1)} ${units[0]}`;
  }
  function time(seconds) {
    if (!known(seconds)) return '-';
    if (seconds < 1e-3) return `${Math.round(seconds * 1e6)} µs`;
    const places = seconds < 0.01 ? 2 : seconds < 0.1 ? 1 : 0;
    if (seconds < 1) return `${(seconds * 1e3).toFixed(places)} ms`;
    if (seconds < 99.95) return `${seconds.toFixed(1)} s`;
    const whole = Math.round(seconds), minutes = Math.floor(whole / 60);
    return whole < 3600 ? `${minutes} min ${whole % 60} s`
      : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
  }
  const nanos = (ns) => time(ns / 1e9);

  // The box under the pointer.
  const tip = h('div.tip', { hidden: true });
  function show(lines, event) {
    tip.replaceChildren(...lines.map((line) => h('div', {}, line)));
    tip.hidden = false;
    const { width, height } = tip.getBoundingClientRect();
    const left = Math.min(event.clientX + 14, document.documentElement.clientWidth - width - 6);
    const below = event.clientY + 16;
    const top = below + height > innerHeight ? event.clientY - height - 12 : below;
    tip.style.transform = `translate(${Math.max(6, left)}px, ${Math.max(6, top)}px)`;
  }
  const hide = () => { tip.hidden = true; };
  addEventListener('scroll', hide, { passive: true });

  // Charts. A curve is {name, style: class of report.css, x: [], y: []}, with `dots` at its points,
  // without `line`, or `faint`: behind the others, with its peaks cut off. Unknown values are gaps.
  const charts = [];
  const probe = h('i', { hidden: true });
  function colour(style, name = '--c') {
    probe.className = style;
    return getComputedStyle(probe).getPropertyValue(name).trim();
  }

  // Returns a running mean over a fortieth of the curve, in front of the curve itself.
  function smoothed(curve) {
    if (curve.x.length < 20) return [{ ...curve, dots: curve.x.length < 2 }];
    const memory = 1 - 1 / Math.max(2, curve.x.length / 40);
    let sum = 0, weight = 0;
    const y = curve.y.map((value) => {
      if (!known(value)) return null;
      sum = memory * sum + value;
      weight = memory * weight + 1;
      return sum / weight;
    });
    return [{ ...curve, faint: true }, { ...curve, y }];
  }

  // Returns the limits of the vertical axis.
  function range({ curves, fromZero, highest = Infinity, cutLow = 0 }, isLog) {
    const values = curves.flatMap((curve) => {
      const own = curve.y.filter((y) => known(y) && (!isLog || y > 0)).sort((a, b) => a - b);
      const cut = curve.faint ? Math.floor(own.length / 100) : 0;
      return own.slice(Math.max(cut, Math.floor(cutLow * own.length)), own.length - cut);
    });
    if (values.length === 0) return isLog ? [1, 10] : [0, 1];
    const low = values.reduce((a, b) => Math.min(a, b));
    const high = values.reduce((a, b) => Math.max(a, b));
    if (isLog) {
      const margin = Math.max(1.01, (high / low) ** 0.05);
      return [low / margin, high * margin];
    }
    const bottom = fromZero ? Math.min(0, low) : low;
    const margin = high > bottom ? 0.05 * (high - bottom) : 0.1 * Math.abs(high) || 0.01;
    return [fromZero ? bottom : bottom - margin, Math.max(high, Math.min(high + margin, highest))];
  }

  // Returns the rows of dygraphs: x and a value per curve; null is no point of the curve, NaN a
  // gap.
  function rowsOf(curves) {
    const rows = new Map();
    curves.forEach((curve, i) => curve.x.forEach((x, k) => {
      if (!rows.has(x)) rows.set(x, [x, ...curves.map(() => null)]);
      rows.get(x)[i + 1] = curve.y[k] ?? NaN;
    }));
    return [...rows.values()].sort((a, b) => a[0] - b[0]);
  }

  function nearest(curve, x) {
    let best = -1;
    const distance = (i) => Math.abs(curve.x[i] - x);
    curve.y.forEach((y, i) => {
      if (known(y) && (best < 0 || distance(i) < distance(best))) best = i;
    });
    return best;
  }

  // Fingers scroll the page; two of them zoom.
  function interaction() {
    const model = { ...Dygraph.defaultInteractionModel };
    for (const name of ['touchstart', 'touchmove']) {
      const handle = model[name];
      model[name] = (event, ...others) => {
        if (event.touches.length > 1) handle(event, ...others);
      };
    }
    return model;
  }

  // Returns a chart of {title, unit, curves, log: the reader may choose that scale, fromZero,
  // highest, cutLow: part of each curve's lowest values that may be cut off, xName, xLog2, xEnd}.
  function chart(spec) {
    const { curves, xName = 'step', xLog2 = false, unit = '', empty = 'No step was run.' } = spec;
    const named = curves.filter((curve) => !curve.faint);
    const place = (x) => `${xName} ${count(x)}`;
    const four = (y) => String(+y.toPrecision(4));
    const value = (y) => (unit === '%' ? percent(y) : Math.abs(y) >= 1000 ? count(y) : four(y));
    const tick = (y) => (unit === '%' ? `${four(100 * y)} %` : y >= 1e6 ? `${four(y / 1e6)}M`
      : y >= 1e4 ? `${four(y / 1e3)}k` : four(y));
    const plot = h('div.plot', {
      role: 'img', ariaLabel: `${spec.title}: ${named.map((curve) => curve.name).join(', ')}` });
    const log = h('input', { type: 'checkbox' });
    const keys = named.map((curve) => h(`span.key.${curve.style}`, {}, curve.name));
    const hasPoints = curves.some((curve) => curve.y.some(known));
    if (hasPoints && spec.log) keys.push(h('label.scale', {}, log, ' log'));
    const figure = h('figure.chart', {},
      h('figcaption', {}, h('b', {}, spec.title),
        unit === '%' ? '' : h('span.unit', {}, unit), h('span.keys', {}, keys)),
      hasPoints ? plot : h('p.none', {}, empty));
    if (!hasPoints) return figure;

    const shift = xLog2 ? Math.log2 : (x) => x;
    const rows = rowsOf(curves).map(([x, ...ys]) => [shift(x), ...ys]);
    const end = Math.max(1, spec.xEnd ?? 0, rows[rows.length - 1][0]);
    const whole = [-0.015 * end, 1.015 * end];  // The margins have place for dots.
    const labels = curves.map((_, i) => String(i));  // dygraphs would read names as HTML.
    const look = () => ({
      colors: curves.map((curve) => colour(curve.style) + (curve.faint ? '40' : '')),
      gridLineColor: colour('', '--line'),
      axisLineColor: colour('', '--faint'),
      logscale: log.checked,
      valueRange: range(spec, log.checked),
    });
    const draw = () => {
      const graph = new Dygraph(plot, rows, {
        ...look(),
        labels: ['x', ...labels],
        legend: 'never',
        dateWindow: whole,
        connectSeparatedPoints: true,
        interactionModel: interaction(),
        highlightCircleSize: 3,
        gridLineWidth: 1,
        series: Object.fromEntries(curves.map((curve, i) => [labels[i], {
          strokeWidth: curve.noLine ? 0 : curve.faint ? 1 : 2,
          drawPoints: Boolean(curve.dots) && curve.x.length <= 60,
          pointSize: 3.5,
        }])),
        axes: {
          x: {
            drawGrid: false,
            pixelsPerLabel: 45,
            axisLabelFormatter: (x) => (x === 0 ? place(xLog2 ? 1 : 0)
              : !Number.isInteger(x) ? '' : count(xLog2 ? 2 ** x : x)),
          },
          y: { axisLabelWidth: 46, axisLabelFormatter: tick },
        },
        highlightCallback: (event, at) => {
          const x = xLog2 ? 2 ** at : at;
          show([place(x), ...named.filter((curve) => curve.y.some(known)).map((curve) => {
            const i = nearest(curve, x);
            const where = curve.x.length < 60 ? ` (${place(curve.x[i])})` : '';
            return `${curve.name}: ${value(curve.y[i])}${where}`;
          })], event);
        },
        unhighlightCallback: hide,
      });
      // For a double click or tap. That of dygraphs would drop these limits.
      graph.resetZoom = () => graph.updateOptions({ ...look(), dateWindow: whole });
      const redraw = () => graph.updateOptions(look());
      log.addEventListener('change', redraw);
      matchMedia('(prefers-color-scheme: dark)').addEventListener('change', redraw);
    };
    charts.push(draw);
    return figure;
  }

  // Bars. A position or length is a part of the row; a label is shown where it fits.
  const rowWidth = innerWidth <= 640 ? innerWidth - 54 : Math.min(innerWidth, 1200) - 326;
  function box(begin, length, style, lines, label = '') {
    const width = 100 * Math.max(0, length);
    const element = h(`i.box.${style}`,
      { style: `left:${100 * begin}%;width:${width}%`, ariaLabel: lines.join(', ') },
      7 * label.length < length * rowWidth ? label : '');
    element.addEventListener('pointermove', (event) => show(lines, event));
    element.addEventListener('pointerleave', hide);
    return element;
  }

  // Returns bars one behind the other; `most` fills the row.
  function stacked(values, most, styles, names, format) {
    let begin = 0;
    return values.map((value, i) => {
      const length = value / Math.max(1, most);
      begin += length;
      const text = `${names[i]}: ${format(value)}`;
      return value === 0 ? null : box(begin - length, length, styles[i], [text]);
    });
  }

  const lane = (rank, text, bars, ...below) => h('div.lane', {},
    h('div.who', {}, h('b', {}, `rank ${rank}`), ' ', h('span', {}, text)),
    h('div.rows', {}, h('div.row', {}, bars), below));
  const legend = (entries) => h('p.keys', {},
    entries.map(([style, name]) => h(`span.key.${style}`, {}, name)));
  const more = (list, what) => (
    list.more > 0 ? h('p.note', {}, `and ${count(list.more)} more ${what}`) : null);
  const largest = (list, value) => list.reduce((most, one) => Math.max(most, value(one)), 0);

  // Returns a section of the page; null if it has no content.
  function section(heading, lead, ...content) {
    const shown = content.flat().filter(Boolean);
    return shown.length === 0 ? null : h('section', {},
      h('h2', {}, heading), lead ? h('p.lead', {}, lead) : null, shown);
  }

  const header = (run, figures) => h('header', {},
    h('p.mark', {}, h('span', {}, 'evenkeel'), h('time', {}, run.date ?? '')),
    h('h1', {}, run.title),
    h('p.summary', {}, run.summary ?? ''),
    run.goes_on
      ? h('p.ending', {}, 'The run is still in progress; this page is updated every minute.')
      : null,
    run.ending && !run.goes_on
      ? h('p.ending', {}, h('b', {}, 'The run did not come to its end. '), run.ending) : null,
    figures);

  function figures(run) {
    const figure = (name, value, after) => h('div.figure', {},
      h('span.name', {}, name), h('span.value', {}, value), h('span.more', {}, after));
    const { result, means } = run, all = [];
    if (result) {
      const after = `after ${plural(result.epochs, 'epoch')}`;
      all.push(run.is_in_bits_per_byte
        ? figure('Test bits per byte', digits(result.bits_per_byte, 3), after)
        : figure('Test accuracy', percent(result.test_accuracy, 2), after));
      all.push(figure('Test loss', digits(result.test_loss, 4),
        `training ${digits(result.train_loss, 4)}`));
    }
    if (known(means.step_seconds)) {
      all.push(figure(`${run.unit} per second`, number(means.rate),
        `${time(means.step_seconds)} per step`));
      all.push(figure('Exposed communication', percent(means.exposed), "of a step's time"));
    }
    const hasLost = run.ranks_left > 0 && run.ranks_left < run.world_size;
    all.push(figure('Ranks', String(run.world_size),
      hasLost ? `${run.ranks_left} at the end` : plural(run.parameters, 'parameter')));
    all.push(figure('Time', time(run.seconds), plural(run.total_steps, 'step')));
    return h('div.figures', {}, all);
  }

  function curves(run) {
    const { steps, tests, reporter } = run;
    const xEnd = run.total_steps;
    const training = `training, rank ${reporter}`;
    const own = (y, name, style) => smoothed({ name, style, x: steps.step, y });
    const tested = (y) => ({ name: 'test', style: 'test', x: tests.step, y, dots: true });
    const rates = steps.learning_rate.filter(known);
    // The settings show a constant rate.
    const hasSchedule = rates.some((rate) => rate !== rates[0]);
    const learning = [
      chart({ title: run.is_in_bits_per_byte ? 'Bits per byte' : 'Loss', log: true, fromZero: true,
        xEnd, curves: [...own(steps.loss, training, 'train'), tested(tests.loss)] }),
      chart({ title: 'Accuracy', unit: '%', highest: 1, cutLow: 0.04, xEnd,
        curves: [...own(steps.accuracy, training, 'train'), tested(tests.accuracy)] }),
      hasSchedule ? chart({ title: 'Learning rate', fromZero: true, xEnd,
        curves: [{ name: 'learning rate', style: 'plain', x: steps.step,
          y: steps.learning_rate }] }) : null,
      steps.gradient_norm.some(known) ? chart({ title: 'Gradient norm before clipping', log: true,
        fromZero: true, xEnd, curves: own(steps.gradient_norm, 'gradients', 'plain') }) : null,
    ];
    const speed = [
      chart({ title: 'Throughput', unit: `${run.unit} per second`, fromZero: true, xEnd,
        curves: own(steps.rate, 'all ranks', 'rate') }),
      chart({ title: 'Duration of a step', unit: 'ms', fromZero: true, xEnd,
        curves: own(steps.ms, `rank ${reporter}`, 'plain') }),
      chart({ title: 'Exposed communication, part of a step', unit: '%', fromZero: true, highest: 1,
        xEnd, curves: own(steps.exposed, `rank ${reporter}`, 'exposed') }),
    ];
    return [section('Learning', '', h('div.charts', {}, learning)),
      section('Speed', '', h('div.charts', {}, speed))];
  }

  // The computation of each rank in a sampled step, and below it the reduction of its buckets, in
  // one shade where backward hid it and in another where the rank waited.
  function sampledLane(run, one, length) {
    const span = ({ kind, begin, end }) => box(begin / length, (end - begin) / length, `k${kind}`,
      [`${run.span_kinds[kind]}: ${nanos(end - begin)}`], run.span_kinds[kind]);
    const bucket = ({ bytes, ready, start, reduced }, i) => {
      const last = one.last_gradient ?? 0;
      const middle = Math.min(Math.max(last, start), Math.max(start, reduced));
      const lines = [`bucket ${i}, ${size(bytes)}`,
        `reduced for ${nanos(Math.max(0, reduced - start))}`,
        `of that ${nanos(Math.max(0, reduced - middle))} exposed`,
        `ready ${nanos(Math.max(0, start - ready))} before it could start`];
      const part = (from, to, style) => (to > from
        ? box(from / length, (to - from) / length, style, lines, `bucket ${i}`) : null);
      return [part(start, middle, 'hidden'), part(middle, reduced, 'exposed')];
    };
    const { spans } = one;
    const took = nanos(spans[spans.length - 1].end - spans[0].begin);
    const isShadow = run.span_kinds[spans[0].kind].startsWith('shadows');
    const waited = spans.filter(({ kind }) => run.span_kinds[kind] === 'wait')
      .reduce((sum, { begin, end }) => sum + end - begin, 0);
    const enqueued = one.enqueued === null ? '' : `; enqueued in ${nanos(one.enqueued)}`;
    const text = isShadow ? `no more input; shadowed a step for ${took}`
      : `${took}, ${nanos(waited)} exposed${enqueued}`;
    return lane(one.rank, text, spans.map(span), h('div.row.thin', {}, one.buckets.map(bucket)),
      one.last_gradient === null ? null
        : h('i.edge', { style: `left:${100 * one.last_gradient / length}%` }));
  }

  // An axis with a round number of milliseconds between its labels.
  function axis(length) {
    const rough = length / 1e6 / 5, power = 10 ** Math.floor(Math.log10(rough));
    const step = power * [1, 2, 5, 10].find((factor) => factor * power >= rough);
    const labels = [];
    for (let i = 0; i * step <= length / 1e6; ++i) {
      labels.push(h('span.x', { style: `left:${100 * i * step * 1e6 / length}%` },
        `${+(i * step).toPrecision(6)}${i === 0 ? ' ms' : ''}`));
    }
    return h('div.axis', {}, h('div.who', {}), h('div.rows', {}, labels));
  }

  function sampled(run) {
    if (run.sampled.length === 0) return null;
    const isOnDevices = run.sampled.some((step) => step.shown.some((one) => one.enqueued !== null));
    const lead = isOnDevices
      ? "The work of each rank's device in a few sampled steps, timed by marks on its stream: data "
        + 'and begin are times in which it waited for them, wait is the time for gradients that '
        + "backward did not hide. Shadowed steps are timed by the host's clock. Buckets are "
        + 'reduced on other streams and are not shown.'
      : 'The work of each rank in a few sampled steps, and below it the reduction of its gradient '
        + 'buckets. The line marks its last gradient: the part of the reduction after it was not '
        + 'hidden.';
    const pane = h('div.pane', {});
    const choose = (step) => pane.replaceChildren(...[
      step.shown.map((one) => sampledLane(run, one, step.length)),
      axis(step.length), more(step, 'ranks; they are in the trace')].flat().filter(Boolean));
    const middle = run.sampled[Math.floor(run.sampled.length / 2)];
    choose(middle);
    const picker = h('div.picker', {}, run.sampled.map((step) => h('label', {},
      h('input',
        { type: 'radio', name: 'step', checked: step === middle, onchange: () => choose(step) }),
      h('span', {}, `step ${count(step.step)}`))));
    const kinds = run.span_kinds.slice(0, -1).map((name, kind) => [`k${kind}`, name]);
    return section('Steps, rank by rank', lead, picker,
      legend([...kinds, ['hidden', 'reduction of a bucket, hidden by backward'],
        ['exposed', 'exposed']]), pane);
  }

  function batches(run) {
    if (!run.batches) return null;
    const { steps, shown } = run.batches;
    const epoch = (one) => {
      const name = `epoch ${one.epoch + 1}`;
      const end = one.first_step + one.batches;
      return [box(one.first_step / steps, one.batches / steps, 'had',
        [`${name}: ${count(one.batches)} batches`]),
        one.shadowed > 0 ? box(end / steps, one.shadowed / steps, 'exhausted', [
          `${name}: exhausted after step ${count(end)}`,
          `shadowed ${plural(one.shadowed, 'step')} of active ranks`]) : null];
    };
    const text = (one) => [`${count(one.batches)} batches`,
      ...(one.exhausted === null ? [] : [`first exhausted after step ${count(one.exhausted)}`,
        `shadowed ${plural(one.shadowed, 'step')}`]),
      ...(one.until === null ? [] : [`until step ${count(one.until)}`])].join(', ');
    const isUneven = shown.some((one) => one.exhausted !== null);
    const lead = run.samples_of_tail === 0 ? 'All ranks had a batch in every step.'
      : `Exhausted ranks shadow the active ranks' steps. This way ${count(run.samples_of_tail)} `
        + 'more samples were used for training than if the group had stopped with the first '
        + 'exhausted rank.';
    return section(run.samples_of_tail > 0 ? 'Uneven ranks' : 'Batches of each rank', lead,
      shown.map((one) => lane(one.rank, text(one), one.epochs.map(epoch))),
      legend([['had', 'steps with a batch of its own'],
        ...(isUneven ? [['exhausted', "no more input, shadows the active ranks' steps"]] : [])]),
      more(run.batches, 'ranks'));
  }

  function waits(run) {
    const styles = ['k1', 'k0', 'k2', 'k3', 'k5', 'm4', 'k4'];
    const names = [...run.waits.phases, 'waiting'];
    const longest = largest(run.waits.shown, (one) => one.total);
    const ms = (us) => number(us / 1e3);
    const row = (one) => {
      let text = `cost the group ${percent(one.cost)}`;
      if (one.without_input > 0) text += `, no input for ${percent(one.without_input)}`;
      if (one.ready) {
        const [first, last] = one.ready;
        const from = first < last ? `${ms(first)} to ` : '';
        text += `, buckets ready after ${from}${ms(last)} ms of backward`;
      }
      return lane(one.rank, text, stacked(one.us, longest, styles, names, (us) => `${ms(us)} ms`));
    };
    const colours = ['k4', 'k2', 'k3', 'k5', 'k0', 'm4'];
    const ranks = [...new Set([...run.costs, ...run.shares].map((one) => one.rank))];
    ranks.sort((a, b) => a - b);  // A rank has one colour in both charts.
    const curve = (one) => ({ style: colours[ranks.indexOf(one.rank) % colours.length],
      x: one.step, y: one.cost ?? one.samples,
      name: `rank ${one.rank}${one.until === null ? '' : `, until step ${count(one.until)}`}` });
    const isShown = longest > 0 && run.waits.shown.length > 1;
    return section('Waits by rank', 'The mean step of each rank. All ranks leave a reduction '
      + 'together, so the one with the shortest wait is the last to arrive. The cost of a rank is '
      + 'its share of the time that delays cost the group.',
    isShown ? [...run.waits.shown.map(row), legend(names.map((name, i) => [styles[i], name])),
      more(run.waits, 'ranks')] : null,
    run.costs.length > 0 ? h('div.charts', {},
      chart({ title: 'Cost of a rank, part of the time', unit: '%', fromZero: true,
        xEnd: run.total_steps, curves: run.costs.map(curve) }),
      run.shares.length > 0 ? chart({ title: 'Samples of a rank in a step', fromZero: true,
        xEnd: run.total_steps, curves: run.shares.map(curve) }) : null) : null);
  }

  function plans(run) {
    const most = largest(run.plans.shown, (plan) => largest(plan.shown, ({ bytes }) => bytes));
    if (most === 0) return null;
    const names = (all) => [all.slice(0, 8).join(', '), all.length > 8 ? h('details', {},
      h('summary', {}, `and ${all.length - 8} more`), all.slice(8).join(', ')) : null];
    const bucket = ({ bytes, parameters }, i) => h('div.bucket', {},
      h('span.number', {}, String(i)), h('div', {},
        h('div.row', {}, box(0, bytes / most, 'bytes', [`bucket ${i}: ${size(bytes)}`])),
        h('p', {}, h('b', {}, size(bytes)), ' ', names(parameters))));
    const one = (plan, i) => h('div.plan', {},
      h('h3', {}, i === 0 ? 'First plan, by type' : `After step ${count(plan.step)}`),
      h('p.note', {}, `${plural(plan.shown.length + plan.more, 'bucket')}, ${size(plan.bytes)}`),
      plan.shown.map(bucket), more(plan, 'buckets'));
    return section('Gradient buckets', 'The first step shows in which order gradients arrive; the '
      + 'plan made from it sends the gradients that are ready first.',
    h('div.plans', {}, run.plans.shown.map(one)), more(run.plans, 'plans'));
  }

  function memory(run) {
    const { parts, shown } = run.memory;
    const most = largest(shown, (one) => one.total);
    if (most === 0) return null;
    const styles = parts.map((_, i) => `m${i}`);
    const text = (one) => size(one.total) + (one.host ? ` on ${one.host}` : '')
      + (one.peak > 0 ? `, process at most ${size(one.peak)}` : '');
    return section('Memory per rank', 'Memory of the model, the library, the optimizer and the '
      + 'data. A process also holds code.',
    shown.map((one) => lane(one.rank, text(one), stacked(one.bytes, most, styles, parts, size))),
      legend(parts.map((name, i) => [styles[i], name])), more(run.memory, 'ranks'));
  }

  function events(run) {
    const row = ({ step, seconds, kind, text }) => h('tr', {},
      h('td.when', {}, `step ${count(step)}`, h('span', {}, time(seconds))),
      h('td', {}, h('b.tag', {}, kind), ' ', text));
    const { shown } = run.events;
    return section('Events', '',
      shown.length > 0 ? h('table.events', {}, h('tbody', {}, shown.map(row))) : null,
      more(run.events, 'events'));
  }

  const setting = ({ name, value }) => h('div', {}, h('dt', {}, name), h('dd', {}, value));
  const settings = (run) => section('Settings', '',
    run.settings.length > 0 ? h('dl.settings', {}, run.settings.map(setting)) : null);

  const report = (run) => [header(run, figures(run)),
    h('main', {}, [...curves(run), sampled(run), batches(run), waits(run), plans(run), memory(run),
      events(run), settings(run)]),
    h('footer', {}, 'Written by evenkeel. Steps are counted from 1. In a curve: drag to zoom, '
      + 'double-click to see all of it.')];

  const forecast = (page) => [header(page, null), h('main', {}, [
    section('By the number of ranks', '', h('div.charts', {}, page.charts.map(chart))),
    section('Numbers', '', h('pre', {}, page.text))]), h('footer', {}, 'Predicted by evenkeel.')];

  document.title = data.title;
  document.body.append(...(data.charts ? forecast(data) : report(data)), tip, probe);
  for (const draw of charts) draw();  // dygraphs needs the size of its place.
})();
