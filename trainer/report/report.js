// Shows values under the pointer. The report is complete without it.
(() => {
  'use strict';
  const tip = document.createElement('div');
  tip.className = 'tip';
  tip.hidden = true;
  document.body.append(tip);

  function show(lines, event) {
    tip.replaceChildren(...lines.map((line) => {
      const div = document.createElement('div');
      div.textContent = line;
      return div;
    }));
    tip.hidden = false;
    const { width, height } = tip.getBoundingClientRect();
    const left = Math.min(event.clientX + 14, document.documentElement.clientWidth - width - 6);
    const top = event.clientY + 16 + height > innerHeight ? event.clientY - height - 12 : event.clientY + 16;
    tip.style.transform = `translate(${Math.max(6, left)}px, ${Math.max(6, top)}px)`;
  }
  const hide = () => { tip.hidden = true; };

  // Points are x, y, x, y, ...; answers the index of the y whose x is nearest.
  function nearest(points, x) {
    let low = 0;
    let high = points.length / 2 - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (points[2 * middle] < x) low = middle; else high = middle;
    }
    return 2 * (Math.abs(points[2 * low] - x) <= Math.abs(points[2 * high] - x) ? low : high) + 1;
  }

  function readable(value, isPercent) {
    if (isPercent) return `${(100 * value).toFixed(1)} %`;
    return Math.abs(value) >= 1000 ? Math.round(value).toLocaleString('en') : String(Number(value.toPrecision(4)));
  }

  for (const figure of document.querySelectorAll('.chart')) {
    const source = figure.querySelector('script');
    if (!source) continue;
    const data = JSON.parse(source.textContent);
    const place = (x) => `${data.name} ${Math.round(data.base2 ? 2 ** x : x).toLocaleString('en')}`;
    const names = [...figure.querySelectorAll('.key')].map((key) => key.textContent);
    for (const plot of figure.querySelectorAll('.plot')) {
      const cursor = document.createElement('i');
      cursor.className = 'cursor';
      cursor.hidden = true;
      plot.append(cursor);
      plot.addEventListener('pointermove', (event) => {
        const box = plot.getBoundingClientRect();
        const share = Math.min(1, Math.max(0, (event.clientX - box.left) / box.width));
        const x = data.x[0] + share * (data.x[1] - data.x[0]);
        const lines = [place(x)];
        data.curves.forEach((points, i) => {
          if (points.length === 0) return;
          const at = nearest(points, x);
          const where = points.length / 2 < 60 ? ` (${place(points[at - 1])})` : '';
          lines.push(`${names[i]}: ${readable(points[at], data.percent === 1)}${where}`);
        });
        cursor.style.left = `${100 * share}%`;
        cursor.hidden = false;
        show(lines, event);
      });
      plot.addEventListener('pointerleave', () => { cursor.hidden = true; hide(); });
    }
  }

  // A title is for pages without script: it comes late, and never on a phone.
  for (const box of document.querySelectorAll('.box[title]')) {
    const text = box.title;
    box.removeAttribute('title');
    box.setAttribute('aria-label', text);
    const lines = text.split(': ').flatMap((part, i, all) => (i === 0 && all.length > 1 ? [`${part}:`] : part.split(/[,;] /)));
    box.addEventListener('pointermove', (event) => show(lines, event));
    box.addEventListener('pointerleave', hide);
  }
  addEventListener('scroll', hide, { passive: true });
})();
