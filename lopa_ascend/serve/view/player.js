// Moves one or two panels through their passes: together pass by pass, or by the clock.

const PASSES_A_SECOND = 3; // at speed 1

export class Player {
  constructor(controls) {
    this.controls = controls;
    this.panels = [];
    this.position = 0; // passes, or seconds
    this.isPlaying = false;
    this.isFollowing = true; // the latest pass is shown as it comes
    const { play, back, forth, scrub, by } = controls;
    play.addEventListener("click", () => (this.isPlaying ? this.pause() : this.play()));
    back.addEventListener("click", () => this.step(-1));
    forth.addEventListener("click", () => this.step(1));
    scrub.addEventListener("input", () => this.seek(Number(scrub.value)));
    by.addEventListener("change", () => this.seek(0));
    document.addEventListener("keydown", (event) => this.key(event));
    this.draw();
  }

  get byClock() { return this.controls.by.value === "clock"; }
  get end() { return Math.max(0, ...this.panels.map(({ run }) => (this.byClock ? run.seconds : run.last))); }

  use(panels) {
    this.panels = panels;
    this.isPlaying = false;
    this.isFollowing = true;
    this.draw();
  }

  // Called when a run has grown.
  refresh() {
    if (this.isFollowing) this.position = this.end;
    this.draw();
  }

  play() {
    if (this.position >= this.end) this.position = 0;
    this.isPlaying = true;
    this.isFollowing = false;
    let before = performance.now();
    const tick = (now) => {
      if (!this.isPlaying) return;
      const speed = Number(this.controls.speed.value) * (this.byClock ? 1 : PASSES_A_SECOND);
      this.position = Math.min(this.end, this.position + ((now - before) / 1000) * speed);
      before = now;
      if (this.position >= this.end) this.isPlaying = false;
      this.draw();
      requestAnimationFrame(tick);
    };
    requestAnimationFrame(tick);
    this.draw();
  }

  pause() {
    this.isPlaying = false;
    this.draw();
  }

  seek(position) {
    this.isPlaying = this.isFollowing = false;
    this.position = Math.min(this.end, Math.max(0, position));
    this.draw();
  }

  // To the pass before or after, of whichever panel has one next.
  step(direction) {
    if (!this.byClock) return this.seek(Math.floor(this.position) + direction);
    const times = [0, ...this.panels.flatMap(({ run }) => run.steps.map((step) => step.seconds))].sort((a, b) => a - b);
    const next = direction > 0 ? times.find((time) => time > this.position) : times.findLast((time) => time < this.position);
    this.seek(next ?? this.position);
  }

  key(event) {
    const isElsewhere = event.target.closest("textarea, input:not([type=range]), select, button, summary, a");
    if (isElsewhere || event.ctrlKey || event.metaKey || event.altKey) return;
    const actions = {
      " ": () => (this.isPlaying ? this.pause() : this.play()),
      ArrowLeft: () => this.step(-1),
      ArrowRight: () => this.step(1),
      Home: () => this.seek(0),
      End: () => this.seek(this.end),
    };
    if (!actions[event.key]) return;
    event.preventDefault();
    actions[event.key]();
  }

  // The state in which a run is shown.
  state(run) {
    if (!this.byClock) return Math.min(run.last, Math.floor(this.position));
    return run.steps.filter((step) => step.seconds <= this.position).length;
  }

  draw() {
    const { play, back, forth, scrub } = this.controls, { end } = this;
    for (const panel of this.panels) panel.show(this.state(panel.run));
    play.textContent = this.isPlaying ? "Pause" : "Play";
    play.disabled = back.disabled = forth.disabled = scrub.disabled = !end;
    scrub.max = end;
    scrub.step = this.byClock ? "any" : 1;
    scrub.value = this.byClock ? this.position : Math.floor(this.position);
    const said = this.panels.map(({ run }) => run.sentence(this.state(run)));
    scrub.setAttribute("aria-valuetext", (this.byClock ? `${this.position.toFixed(2)} s. ` : "") + said.join(" "));
  }
}
