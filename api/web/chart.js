// The loss chart: uPlot (a global of the vendored script) over the series of metrics.js.

/* global uPlot */

const HEIGHT = 300;
const COLOURS = 6;

export class LossChart {
  #plot = null;
  #shape = "";
  #series = [];
  #box;

  constructor(box, signal) {
    this.#box = box;
    const observer = new ResizeObserver(() => requestAnimationFrame(() => this.#resize()));
    observer.observe(box);
    const scheme = matchMedia("(prefers-color-scheme: dark)");
    scheme.addEventListener("change", () => this.#rebuild(), { signal });
    signal.addEventListener("abort", () => {
      observer.disconnect();
      this.#plot?.destroy();
      this.#plot = null;
    });
  }

  draw(series) {
    this.#series = series;
    const shape = JSON.stringify(series.map(({ label, kind }) => [label, kind]));
    if (this.#plot && shape === this.#shape) return this.#plot.setData(this.#data());
    this.#shape = shape;
    this.#rebuild();
  }

  #width() {
    const style = getComputedStyle(this.#box);
    return this.#box.clientWidth - parseFloat(style.paddingLeft) - parseFloat(style.paddingRight);
  }

  #resize() {
    const width = this.#width();
    if (this.#plot && width > 0 && width !== this.#plot.width) this.#plot.setSize({ width, height: HEIGHT });
  }

  #data() {
    const steps = [...new Set(this.#series.flatMap(({ values }) => [...values.keys()]))].sort((a, b) => a - b);
    return [steps, ...this.#series.map(({ value, values }) => steps.map((step) => value ?? values.get(step) ?? null))];
  }

  #rebuild() {
    this.#plot?.destroy();
    const style = getComputedStyle(this.#box);
    const colour = (name) => style.getPropertyValue(`--${name}`).trim();
    const value = (_, number) => number?.toFixed(3) ?? "–";
    let sites = 0;
    const looks = {
      site: () => ({
        stroke: colour(`series-${(sites % COLOURS) + 1}`),
        dash: sites++ < COLOURS ? [] : [4, 2],
        width: 1.25,
        points: { show: false },
      }),
      heldout: () => ({ stroke: colour("text"), width: 2, points: { show: true, size: 6, fill: colour("card") } }),
      reference: () => ({ stroke: colour("muted"), dash: [8, 5], width: 1, points: { show: false } }),
    };
    const series = this.#series.map(({ label, kind }) => ({ label, value, spanGaps: true, ...looks[kind]() }));
    const axis = { stroke: colour("muted"), font: "12px system-ui, sans-serif", ticks: { show: false } };
    const grid = { stroke: colour("line"), width: 1 };
    this.#plot = new uPlot(
      {
        width: this.#width(),
        height: HEIGHT,
        scales: { x: { time: false } },
        axes: [
          { ...axis, grid: { show: false }, label: "step", labelFont: axis.font, labelSize: 18, size: 32 },
          { ...axis, grid, size: 44 },
        ],
        series: [{ label: "step" }, ...series],
        legend: { markers: { width: 3, dash: (plot, i) => (plot.series[i].dash?.length ? "dashed" : "solid") } },
        cursor: { drag: { x: true, y: false } },
      },
      this.#data(),
      this.#box,
    );
  }
}
