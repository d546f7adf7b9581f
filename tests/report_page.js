// Runs the script of a report's page over a stub of a browser and dygraphs, uses all that reacts,
// and prints the page's text:
//
//   node tests/report_page.js page.html
//
// Ends with an error if the script does, or if it reads a field of a run that its data lacks.
'use strict';
const assert = require('assert');
const { readFileSync } = require('fs');
const vm = require('vm');

const page = readFileSync(process.argv[2], 'utf8');
const json = page.match(/<script type="application\/json" id="data">(.*)<\/script>/)[1];
const script = page.match(/<script>(?:(?!<script>)[^])*<\/script>\n<\/body>/)[0]
  .replace(/^<script>|<\/script>\n<\/body>$/g, '');
const isRun = !('charts' in JSON.parse(json));

const elements = [];
class Element {
  constructor(tag) {
    Object.assign(this, { tag, style: {}, children: [], listeners: {} });
    elements.push(this);
  }
  append(...children) {
    for (const child of children) {
      assert(child instanceof Element || typeof child === 'string', `${child} becomes a text`);
    }
    this.children.push(...children);
  }
  replaceChildren(...children) { this.children = []; this.append(...children); }
  addEventListener(name, listener) { this.listeners[name] = listener; }
  getBoundingClientRect() { return { width: 100, height: 20 }; }
  get text() {
    return this.children.map((child) => child.text ?? child).join(this.tag === 'span' ? '' : '\n');
  }
}

const event = { clientX: 1, clientY: 1, touches: [1, 2] };
let drawn = 0;
class Dygraph {
  static defaultInteractionModel = { touchstart() {}, touchmove() {} };
  constructor(plot, rows, options) {
    drawn += 1;
    assert(plot.role === 'img' && plot.ariaLabel, 'a chart has a text for readers of screens');
    assert(rows.length > 0);
    for (const row of rows) assert.strictEqual(row.length, options.labels.length);
    assert.strictEqual(Object.keys(options.series).length + 1, options.labels.length);
    this.checkLimits(options);
    for (const [x] of rows) {
      options.axes.x.axisLabelFormatter(x);
      options.highlightCallback(event, x);
    }
    options.unhighlightCallback();
    for (const y of options.valueRange) assert(options.axes.y.axisLabelFormatter(y));
    for (const react of Object.values(options.interactionModel)) react(event, this, {});
    this.options = options;
    charts.push(this);
  }
  checkLimits({ dateWindow, valueRange }) {
    for (const [low, high] of [dateWindow, valueRange]) assert(low < high, `${low} < ${high}`);
  }
  updateOptions(options) { this.updated = options; }
}
const charts = [];

const strict = {
  get(object, name) {
    assert(name in object || name === 'charts' || typeof name === 'symbol', `no field ${name}`);
    return object[name];
  },
};
const isObject = (value) => value !== null && typeof value === 'object' && !Array.isArray(value);
const parse = (text) => JSON.parse(text, (name, value) => (
  isRun && isObject(value) ? new Proxy(value, strict) : value));

const document = {
  body: new Element('body'),
  documentElement: { clientWidth: 1000 },
  createElement: (tag) => new Element(tag),
  getElementById: () => ({ textContent: json }),
};
vm.runInNewContext(script, {
  document, Dygraph,
  JSON: { parse },
  addEventListener() {},
  getComputedStyle: () => ({ getPropertyValue: () => ' #123456' }),
  innerHeight: 800,
  innerWidth: 1000,
  matchMedia: () => ({ addEventListener: (name, listener) => listener() }),
});

for (const chart of charts) {
  chart.resetZoom();
  chart.checkLimits(chart.updated);
  assert.deepStrictEqual(chart.updated.dateWindow, chart.options.dateWindow);
  assert.deepStrictEqual(chart.updated.valueRange, chart.options.valueRange);
}
const texts = [document.title, document.body.text];
for (const element of [...elements]) {
  for (const listener of Object.values(element.listeners)) listener(event);
  if (element.onchange) {
    element.onchange();
    texts.push(document.body.text);
  }
  if (element.className?.startsWith('box')) {
    texts.push(element.ariaLabel);
    const parts = element.style.cssText.match(/^left:(\S+)%;width:(\S+)%$/);
    assert(parts && parts[1] >= 0 && parts[2] >= 0, element.style.cssText);
  }
}
const all = texts.join('\n');
const wrong = all.match(/.*(undefined|NaN|Infinity|\[object|null).*/);
assert(!wrong, wrong?.[0]);
console.log(`${all}\n${drawn} charts`);
