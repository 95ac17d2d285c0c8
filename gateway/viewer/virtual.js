// Lists of any length with a bounded number of elements: only what is in sight is in the document.

const MARGIN = 500; // pixels that are kept ready above and below what is in sight

// `estimate(i)` is an item's height in pixels before it was ever rendered, `render(i)` its element.
// With `fixed` the estimate is the height.
export class VirtualList {
  constructor(viewport, { estimate, render, fixed = false }) {
    this.viewport = viewport;
    this.estimate = estimate;
    this.render = render;
    this.fixed = fixed;
    this.count = 0;
    this.shown = new Map(); // index -> element
    this.space = document.createElement("div");
    this.space.className = "space";
    this.space.setAttribute("role", "presentation");
    viewport.replaceChildren(this.space);
    viewport.addEventListener("scroll", () => this.schedule(), { passive: true });
    // What was scrolled to stays at the top while heights become known, until a person moves on.
    for (const kind of ["wheel", "pointerdown", "touchstart", "keydown"]) {
      viewport.addEventListener(kind, () => (this.pinned = -1), { passive: true });
    }
    let width = viewport.clientWidth;
    new ResizeObserver(() => {
      if (!this.fixed && viewport.clientWidth !== width) this.forgetHeights();
      width = viewport.clientWidth;
      this.schedule();
    }).observe(viewport);
    this.reset(0);
  }

  // Another content of `count` items. With `keep` the view stays where it is.
  reset(count, { keep = false } = {}) {
    this.count = count;
    this.pinned = -1;
    this.clear();
    this.forgetHeights();
    if (!keep) this.viewport.scrollTop = 0;
    this.layout();
  }

  // So many items from now on; those before `from` are as they were, and the view stays where it is.
  grow(count, from) {
    for (const [i, element] of this.shown) {
      if (i < from) continue;
      element.remove();
      this.shown.delete(i);
    }
    const { heights, offsets } = this;
    this.count = count;
    this.heights = Float64Array.from({ length: count }, (_, i) => (i < from ? heights[i] : this.estimate(i)));
    this.offsets = new Float64Array(count + 1);
    this.offsets.set(offsets.subarray(0, from + 1));
    this.moved(from);
    this.layout();
  }

  forgetHeights() {
    this.heights = Float64Array.from({ length: this.count }, (_, i) => this.estimate(i));
    this.moved(0);
  }

  // Offsets from item `from` on are out of date.
  moved(from) {
    if (from === 0) this.offsets = new Float64Array(this.count + 1);
    for (let i = from; i < this.count; i++) this.offsets[i + 1] = this.offsets[i] + this.heights[i];
    this.space.style.height = `${this.offsets[this.count]}px`;
  }

  clear() {
    this.shown.clear();
    this.space.replaceChildren();
  }

  schedule() {
    this.frame ??= requestAnimationFrame(() => this.layout());
  }

  // Render item `i` again, where it is in sight.
  refresh(i) {
    const old = this.shown.get(i);
    if (!old) return;
    const made = this.make(i);
    old.replaceWith(made);
    this.shown.set(i, made);
    this.schedule();
  }

  refreshAll() {
    for (const i of [...this.shown.keys()]) this.refresh(i);
  }

  element(i) {
    return this.shown.get(i);
  }

  // The item at a height of the content.
  at(y) {
    let low = 0;
    let high = this.count - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (this.offsets[middle] <= y) low = middle;
      else high = middle - 1;
    }
    return low;
  }

  make(i) {
    const element = this.render(i);
    element.classList.add("item");
    element.style.transform = `translateY(${this.offsets[i]}px)`;
    return element;
  }

  layout() {
    cancelAnimationFrame(this.frame);
    this.frame = undefined;
    if (!this.count || !this.viewport.clientHeight) return;
    for (let pass = 0; pass < 4; pass++) {
      const top = this.viewport.scrollTop;
      const first = this.at(Math.max(top - MARGIN, 0));
      const last = this.at(top + this.viewport.clientHeight + MARGIN);
      for (const [i, element] of this.shown) {
        if (i < first || i > last) {
          element.remove();
          this.shown.delete(i);
        }
      }
      for (let i = last, next = null; i >= first; i--) {
        let element = this.shown.get(i);
        if (!element) {
          element = this.make(i);
          this.space.insertBefore(element, next);
          this.shown.set(i, element);
        }
        next = element;
      }
      if (this.fixed || !this.measure(first, last)) break;
    }
  }

  // Take the heights of what is shown; what was at the top of the view, or is to be there, stays there.
  measure(first, last) {
    const anchor = this.at(this.viewport.scrollTop);
    const before = this.offsets[anchor];
    let changed = -1;
    for (let i = last; i >= first; i--) {
      const height = this.shown.get(i).offsetHeight;
      if (Math.abs(height - this.heights[i]) > 0.5) {
        this.heights[i] = height;
        changed = i;
      }
    }
    if (changed < 0) return false;
    this.moved(changed);
    for (const [i, element] of this.shown) element.style.transform = `translateY(${this.offsets[i]}px)`;
    if (this.pinned >= 0) {
      this.viewport.scrollTop = this.offsets[this.pinned];
      return true;
    }
    const shift = this.offsets[anchor] - before;
    if (shift) this.viewport.scrollTop += shift;
    return true;
  }

  // `where`: "nearest" moves only as far as needed, "start" puts the item at the top.
  scrollTo(i, where = "nearest") {
    this.pinned = where === "start" ? i : -1;
    for (let pass = 0; pass < 3; pass++) {
      const top = this.offsets[i];
      const bottom = top + this.heights[i];
      const view = this.viewport;
      if (where === "start" || top < view.scrollTop) view.scrollTop = top;
      else if (bottom > view.scrollTop + view.clientHeight) view.scrollTop = bottom - view.clientHeight;
      this.layout();
      if (this.fixed || this.offsets[i] === top) break;
    }
  }
}

// A list with one current item, which arrow keys move. `role` is that of an item.
export class ChoiceList {
  constructor(viewport, { height, role, render, move, open = () => {}, left = () => {}, right = () => {} }) {
    Object.assign(this, { viewport, role, draw: render, move, open, left, right });
    this.current = -1;
    this.list = new VirtualList(viewport, { estimate: () => height, fixed: true, render: (i) => this.item(i) });
    viewport.addEventListener("keydown", (event) => this.key(event));
    this.list.space.addEventListener("click", (event) => {
      const item = event.target.closest("[data-i]");
      if (!item) return;
      this.choose(Number(item.dataset.i));
      this.open(this.current);
    });
  }

  reset(count, current = -1, options = {}) {
    this.current = current;
    this.list.reset(count, options);
    this.point();
  }

  item(i) {
    const element = this.draw(i);
    element.id = `${this.viewport.id}-${i}`;
    element.dataset.i = i;
    element.setAttribute("role", this.role);
    element.setAttribute("aria-selected", String(i === this.current));
    element.setAttribute("aria-posinset", i + 1);
    element.setAttribute("aria-setsize", this.list.count);
    return element;
  }

  choose(i, { quiet = false, where = "nearest" } = {}) {
    const count = this.list.count;
    if (!count) return;
    const before = this.current;
    this.current = Math.max(0, Math.min(i, count - 1));
    this.list.scrollTo(this.current, where);
    this.list.refresh(before);
    this.list.refresh(this.current);
    this.point();
    if (!quiet && before !== this.current) this.move(this.current);
  }

  // Tell assistive technology which item is current.
  point() {
    if (this.current < 0) this.viewport.removeAttribute("aria-activedescendant");
    else this.viewport.setAttribute("aria-activedescendant", `${this.viewport.id}-${this.current}`);
  }

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const page = Math.max(1, Math.floor(this.viewport.clientHeight / (this.list.heights[0] || 1)) - 1);
    const steps = {
      ArrowDown: () => this.choose(this.current + 1),
      ArrowUp: () => this.choose(this.current - 1),
      PageDown: () => this.choose(this.current + page),
      PageUp: () => this.choose(this.current - page),
      Home: () => this.choose(0),
      End: () => this.choose(this.list.count - 1),
      Enter: () => this.current >= 0 && this.open(this.current),
      ArrowLeft: () => this.left(),
      ArrowRight: () => this.right(this.current),
    };
    if (!(event.key in steps)) return;
    event.preventDefault();
    steps[event.key]();
  }
}
