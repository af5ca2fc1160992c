// Draws one run: counters, blocks, the grid of positions, and the branches of a pass.

import { Grid, element } from "./grid.js";
import { shown } from "./run.js";

export class Panel {
  constructor(parent, run) {
    this.run = run;
    this.at = 0; // the state that is shown
    this.what = ""; // and all that it depends on
    this.rows = [];
    this.title = element("h2");
    this.sentence = element("p", { className: "sentence" });
    this.problem = element("p", { className: "problem", hidden: true });
    this.counts = {};
    const counts = element("dl", { className: "counts" });
    for (const name of ["passes", "tokens", "tokens a pass", "seconds", "tokens a second"]) {
      this.counts[name] = element("dd");
      counts.append(element("div", {}, element("dt", { textContent: name }), this.counts[name]));
    }
    this.blocks = element("div", { className: "blocks" });
    this.blocks.setAttribute("role", "group");
    this.blocks.setAttribute("aria-label", "Blocks");
    this.grid = new Grid((position) => this.explain(position));
    this.detail = element("p", { className: "hint detail" });
    this.body = element("tbody");
    const heads = ["branch", "token", "at", "score", "masks"].map((text) => element("th", { scope: "col", textContent: text }));
    const caption = element("caption", { textContent: "Branches of this pass, with their own tokens" });
    const table = element("table", {}, caption, element("thead", {}, element("tr", {}, ...heads)), this.body);
    const parts = [this.title, counts, this.sentence, this.problem, this.grid.root, this.detail, this.blocks, table];
    this.root = element("section", { className: "panel" }, ...parts);
    parent.append(this.root);
  }

  // Shows state i.
  show(i) {
    const step = this.run.steps[i - 1], what = [i, this.run.events.length, this.run.problem].join();
    if (what === this.what) return;
    Object.assign(this, { at: i, what });
    this.grid.show(this.run, i);
    this.write(i);
    this.writeBlocks(i);
    this.writeBranches(step?.branches ?? [], step?.winner);
  }

  write(i) {
    const { run } = this, isEnd = i === run.last && run.done;
    const tokens = isEnd ? run.done.token_ids.length : run.counts[i] ?? 0, seconds = run.steps[i - 1]?.seconds ?? 0;
    this.title.textContent = run.label;
    this.counts.passes.textContent = i;
    this.counts.tokens.textContent = tokens;
    this.counts["tokens a pass"].textContent = i ? (tokens / i).toFixed(1) : "–";
    this.counts.seconds.textContent = seconds.toFixed(2);
    this.counts["tokens a second"].textContent = seconds ? (tokens / seconds).toFixed(0) : "–";
    const isWhole = run.done && run.done.finish_reason !== "abort";
    this.sentence.textContent = isEnd && isWhole ? `${run.sentence(i)} ${run.ending}` : run.sentence(i);
    this.problem.hidden = isWhole || !run.ending;
    this.problem.textContent = run.ending;
  }

  writeBlocks(i) {
    const blocks = this.run.blocks(i);
    while (this.blocks.children.length > blocks.length) this.blocks.lastChild.remove();
    for (const [index, { begin, end, state }] of blocks.entries()) {
      const chip = this.blocks.children[index] ?? this.blocks.appendChild(element("span"));
      if (chip.className === state) continue;
      chip.className = state;
      chip.textContent = `${begin}–${end - 1} ${state}`;
    }
  }

  writeBranches(branches, winner) {
    while (this.rows.length > branches.length) this.rows.pop().row.remove();
    for (const [rank, branch] of branches.entries()) {
      const { row, cells, meter, number } = (this.rows[rank] ??= this.addRow());
      const own = branch.lookahead ? [branch.lookahead, ...(branch.further ?? [])] : [];
      row.className = rank === winner ? "winner" : "";
      cells[0].textContent = `${rank || "anchor"}${rank === winner ? " wins" : ""}`;
      cells[1].textContent = own.map(shown).join(" ") || "–";
      cells[2].textContent = own.map((fill) => fill.position).join(" ") || "–";
      meter.value = branch.score ?? 0;
      number.textContent = (branch.score ?? 0).toFixed(4);
      cells[4].textContent = branch.masks;
    }
  }

  addRow() {
    const cells = [element("th", { scope: "row" }), ...Array.from({ length: 4 }, () => element("td"))];
    const meter = element("meter", { min: 0, max: 1 }), number = element("span");
    meter.setAttribute("aria-hidden", "true");
    cells[3].append(meter, " ", number);
    const row = element("tr", {}, ...cells);
    this.body.append(row);
    return { row, cells, meter, number };
  }

  explain(position) {
    const { fill, pass, own } = this.run.at(position, this.at) ?? {};
    const who = own ? ` ${own}` : "";
    const said = fill ? `“${shown(fill)}”, probability ${fill.prob.toFixed(4)}, filled by pass ${pass}${who}` : "masked";
    this.detail.textContent = `Position ${position}: ${said}`;
  }
}
