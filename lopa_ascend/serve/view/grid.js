// The positions of an answer as cells on a canvas: thousands of elements would take longer than a frame to lay out.

import { shown } from "./run.js";

const LEVELS = [0.5, 0.8, 0.95, 0.99, 0.999]; // probabilities at which the colour changes
const LARGE = { width: 58, height: 25, hasText: true }, SMALL = { width: 11, height: 11, hasText: false };
const MOST_LARGE = 512; // cells
const level = (prob) => LEVELS.filter((bound) => prob >= bound).length;

export function element(name, properties = {}, ...children) {
  const made = Object.assign(document.createElement(name), properties);
  made.append(...children);
  return made;
}

export function drawScale(parent) {
  for (const [index, bound] of [0, ...LEVELS].entries()) {
    parent.append(element("span", { className: `cell l${index}`, textContent: String(bound).replace("0.", ".") }));
  }
}

export class Grid {
  // explain gets the position under the pointer.
  constructor(explain) {
    this.canvas = element("canvas");
    this.canvas.setAttribute("aria-hidden", "true"); // the sentence of a pass says it
    this.root = element("div", { className: "grid" }, this.canvas);
    this.canvas.addEventListener("pointermove", ({ offsetX, offsetY }) => {
      const position = Math.floor(offsetY / this.cell.height) * this.columns + Math.floor(offsetX / this.cell.width);
      if (position < this.run.size) explain(position);
    });
    new ResizeObserver(() => this.draw()).observe(this.root);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
  }

  show(run, i) {
    Object.assign(this, { run, i });
    this.draw();
  }

  draw() {
    const { run, i, canvas } = this;
    if (!run?.start) return;
    this.cell = run.size > MOST_LARGE ? SMALL : LARGE;
    this.columns = Math.max(1, Math.floor(this.root.clientWidth / this.cell.width));
    const width = this.columns * this.cell.width, height = Math.ceil(run.size / this.columns) * this.cell.height;
    const ratio = devicePixelRatio;
    if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
      Object.assign(canvas, { width: Math.round(width * ratio), height: Math.round(height * ratio) });
      Object.assign(canvas.style, { width: `${width}px`, height: `${height}px` });
    }
    const pen = (this.pen = canvas.getContext("2d")), style = getComputedStyle(canvas);
    const names = ["text", "soft", "mask", "accent", "l0", "l1", "l2", "l3", "l4", "l5"];
    this.colors = Object.fromEntries(names.map((name) => [name, style.getPropertyValue(`--${name}`)]));
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, width, height);
    pen.font = "13px ui-monospace, monospace";
    pen.textBaseline = "middle";
    this.drawCells(run, i);
    this.drawPass(run, i);
  }

  drawCells(run, i) {
    const { pen, colors, cell } = this, open = run.steps[i - 1]?.canvas_length ?? 0;
    const visible = run.done && i === run.last ? run.done.token_ids.length : Infinity;
    for (let position = 0; position < run.size; position++) {
      const known = run.at(position, i), isFilled = Boolean(known), [x, y] = this.place(position);
      pen.globalAlpha = position < visible ? 1 : 0.4;
      if (isFilled || position < open) {
        pen.fillStyle = isFilled ? colors[`l${level(known.fill.prob)}`] : colors.mask;
        pen.fillRect(x, y, cell.width - 2, cell.height - 2);
      } else {
        this.frame(position, colors.mask, 1);
      }
      if (isFilled) this.write(position, known.fill, colors.text);
      if (isFilled && known.own) this.frame(position, colors.accent, 2);
      pen.fillStyle = colors.soft;
      if ((position - run.start.first_block) % run.start.block_size === 0) pen.fillRect(x - 2, y, 2, cell.height - 2);
    }
    pen.globalAlpha = 1;
  }

  // Marks what the pass has filled, and the tokens of branches that lost and of drafts.
  drawPass(run, i) {
    const { fills = [], branches = [], drafted } = run.steps[i - 1] ?? {};
    for (const { position } of fills) if (!run.at(position, i)?.own) this.frame(position, this.colors.text, 1);
    this.pen.setLineDash([3, 2]);
    for (const own of [...branches.map((branch) => branch.lookahead), ...(drafted ?? [])]) {
      if (!own || !(own.position < run.size) || run.at(own.position, i)) continue;
      this.frame(own.position, this.colors.accent, 1);
      this.write(own.position, own, this.colors.soft);
    }
    this.pen.setLineDash([]);
  }

  place(position) {
    return [2 + (position % this.columns) * this.cell.width, Math.floor(position / this.columns) * this.cell.height];
  }

  frame(position, color, width) {
    const [x, y] = this.place(position), { pen, cell } = this;
    Object.assign(pen, { strokeStyle: color, lineWidth: width });
    pen.strokeRect(x + width / 2, y + width / 2, cell.width - 2 - width, cell.height - 2 - width);
  }

  write(position, fill, color) {
    if (!this.cell.hasText) return;
    const [x, y] = this.place(position);
    this.pen.fillStyle = color;
    this.pen.fillText(shown(fill).slice(0, 9), x + 4, y + this.cell.height / 2 - 1, this.cell.width - 9);
  }
}
