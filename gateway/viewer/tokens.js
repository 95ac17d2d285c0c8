// One row, token by token.

import { VirtualList } from "./virtual.js";

const PAGE = 1024; // tokens of one request
const BLOCK = 128; // tokens of one item of the list
const KEPT_PAGES = 64;
const AT_ONCE = 4; // requests in flight
const LINE = 22; // pixels

export function element(tag, className = "", text = "") {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== "") made.textContent = text;
  return made;
}

export const number = (value) => value.toLocaleString("en");

// Characters that would not be seen, or would turn the text around them, by their names.
const HIDDEN =
  /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]/g;

export function visible(text) {
  return text
    .replace(HIDDEN, (c) => (c === "\r" ? "␍" : `⟨${c.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}⟩`))
    .replaceAll("\t", "⇥\t")
    .replaceAll("\n", "⏎\n");
}

// How strongly a token is marked: 8 % for a certain one, 90 % for one of probability 0.
const surprise = (logprob) => 0.08 + 0.82 * (1 - Math.exp(Math.min(logprob, 0)));

export class TokenPane {
  // `fetchTokens(node, start, end)` gives a stretch of a row, `told(turn)` what is known of a turn.
  constructor({ viewport, inspector, fetchTokens, told, entered, failed }) {
    Object.assign(this, { viewport, inspector, fetchTokens, told, entered, failed });
    this.list = new VirtualList(viewport, {
      estimate: (i) => this.height(this.blocks[i]),
      render: (i) => this.block(i),
    });
    this.clear();
    viewport.addEventListener("keydown", (event) => this.key(event));
    viewport.addEventListener("focus", () => this.cursor < 0 && this.row && this.point(this.firstInSight()));
    this.list.space.addEventListener("pointerover", (event) => {
      const token = event.target.closest("[data-p]");
      if (token) this.inspect(Number(token.dataset.p));
    });
    this.list.space.addEventListener("pointerleave", () => this.inspect(this.cursor));
    this.list.space.addEventListener("click", (event) => {
      const token = event.target.closest("[data-p]");
      if (token) this.point(Number(token.dataset.p), { scroll: false });
    });
  }

  clear() {
    this.row = null;
    this.blocks = [];
    this.pages = new Map();
    this.waiting = [];
    this.running = 0;
    this.cursor = -1;
    this.differing = [];
    this.epoch = (this.epoch ?? 0) + 1;
    this.list.reset(0);
    this.inspector.replaceChildren();
  }

  // `row` is what the gateway tells of it: node, length, parts. `versions` gives each weight version a number.
  show(row, versions) {
    this.clear();
    this.row = row;
    this.versions = versions;
    this.divide(0);
    this.list.reset(this.blocks.length);
    this.inspect(-1);
  }

  // Add the blocks of the parts from number `from` on.
  divide(from) {
    this.row.parts.forEach(([turn, sampled, start, end, loss], part) => {
      for (let at = start; part >= from && at < end; at += BLOCK) {
        this.blocks.push({ turn, sampled, loss, part, start: at, end: Math.min(at + BLOCK, end), head: at === start, tokens: end - start });
      }
    });
  }

  atEnd() {
    const view = this.viewport;
    const last = this.blocks.length - 1;
    return this.list.pinned === last || view.scrollTop + view.clientHeight >= view.scrollHeight - 2 * LINE;
  }

  // `row` is what the row that is shown has become: what both begin with stays as it is, and so does the view,
  // unless it was at the end: then it follows.
  grow(row, versions) {
    const follows = this.atEnd();
    const same = row.parts.findIndex((part, i) => String(part) !== String(this.row.parts[i]));
    if (same < 0) return;
    const from = row.parts[same][2];
    this.row = row;
    this.versions = versions;
    this.blocks = this.blocks.filter((block) => block.part < same);
    const kept = this.blocks.length;
    this.divide(same);
    for (const [n, page] of this.pages) {
      const length = Math.max(0, from - page.start);
      if (!length) this.pages.delete(n);
      else for (const list of [page.ids, page.texts, page.loss, page.logprobs]) list.length = Math.min(list.length, length);
    }
    this.cursor = Math.min(this.cursor, row.length - 1);
    this.list.grow(this.blocks.length, kept);
    if (follows) this.list.scrollTo(this.blocks.length - 1, "start");
  }

  // Stretches `[start, end)` in which the row differs from a fresh rendering.
  mark(stretches) {
    if (String(stretches) === String(this.differing)) return;
    this.differing = stretches;
    this.list.refreshAll();
  }

  height(block) {
    const columns = Math.max(20, this.viewport.clientWidth / 8);
    return (block.head ? 36 : 0) + LINE * Math.max(1, Math.ceil(((block.end - block.start) * 3.5) / columns)) + 4;
  }

  // --- data -----------------------------------------------------------------------------------------

  // Page `n`, where it is there up to position `end`.
  page(n, end) {
    const held = this.pages.get(n);
    if (held && held.start + held.ids.length >= Math.min(end, (n + 1) * PAGE)) {
      this.pages.delete(n); // the latest used are the last
      this.pages.set(n, held);
      return held;
    }
    if (!this.waiting.includes(n)) this.waiting.push(n);
    this.pump();
    return null;
  }

  pump() {
    while (this.running < AT_ONCE && this.waiting.length) {
      const n = this.waiting.pop(); // the newest wish is what is in sight
      const { epoch, row } = this;
      this.running++;
      this.fetchTokens(row.node, n * PAGE, Math.min((n + 1) * PAGE, row.length))
        .then((page) => {
          if (epoch !== this.epoch) return;
          if (row !== this.row) return this.list.refreshAll(); // it has grown: what is in sight asks again
          this.pages.set(n, page);
          while (this.pages.size > KEPT_PAGES) this.pages.delete(this.pages.keys().next().value);
          for (const [i, made] of [...this.list.shown]) {
            const block = this.blocks[i];
            const here = block.start < (n + 1) * PAGE && block.end > n * PAGE;
            if (here && made.querySelector(".waiting")) this.list.refresh(i);
          }
          if (Math.floor(this.cursor / PAGE) === n) this.inspect(this.cursor);
        })
        .catch((error) => epoch === this.epoch && this.failed(error))
        .finally(() => {
          if (epoch !== this.epoch) return;
          this.running--;
          this.pump();
        });
    }
  }

  token(position) {
    const page = this.pages.get(Math.floor(position / PAGE));
    const i = position - page?.start;
    if (!(i < page?.ids.length)) return null;
    const version = page.versions.find(([start, end]) => start <= position && position < end);
    return {
      position,
      id: page.ids[i],
      text: page.texts[i],
      loss: page.loss[i],
      logprob: page.logprobs[i],
      version: version ? version[2] : null,
    };
  }

  // --- elements -------------------------------------------------------------------------------------

  block(i) {
    const block = this.blocks[i];
    const made = element("div", `block ${block.sampled ? "sampled" : "given"}`);
    made.setAttribute("role", "presentation");
    if (block.head) made.append(this.head(block));
    const text = element("div", "text");
    text.setAttribute("role", "presentation");
    made.append(text);
    const first = Math.floor(block.start / PAGE);
    const last = Math.floor((block.end - 1) / PAGE);
    let whole = true;
    for (let n = first; n <= last; n++) whole = this.page(n, block.end) !== null && whole;
    if (!whole) {
      text.classList.add("waiting");
      text.style.height = `${this.height(block) - (block.head ? 36 : 0) - 4}px`;
      return made;
    }
    for (let position = block.start; position < block.end; position++) {
      const span = this.span(position);
      text.append(span);
      if (span.textContent.endsWith("\n")) {
        span.textContent = span.textContent.slice(0, -1); // so that its outline ends at the line's end
        text.append("\n");
      }
    }
    return made;
  }

  head(block) {
    const told = this.told(block.turn);
    const head = element("div", "head");
    head.append(element("b", "", `turn ${block.turn}`));
    head.append(element("span", "", `${block.sampled ? "sampled" : told.roles.join(", ") || "prompt"} · ${number(block.tokens)} tokens`));
    if (block.sampled) {
      head.append(element("span", "", `version ${told.versions.join(", ")} · ended by ${told.finish}`));
      if (!block.loss) head.append(element("span", "chip", told.superseded ? "superseded" : "loss in another trajectory"));
    } else {
      if (told.parent === null) head.append(element("span", "chip root", "root"));
      if (told.siblings > 1) head.append(element("span", "chip branch", `branch ${told.branch} of ${told.siblings}`));
    }
    return head;
  }

  span(position) {
    const token = this.token(position);
    const span = element("span", "t", visible(token.text) || "·");
    span.dataset.p = position;
    span.id = `token-${position}`;
    span.setAttribute("role", "option");
    span.setAttribute("aria-selected", String(position === this.cursor));
    if (!token.text) span.classList.add("piece");
    if (token.logprob !== null) {
      span.classList.add(token.loss ? "loss" : "seen");
      span.style.setProperty("--a", `${Math.round(surprise(token.logprob) * 100)}%`);
      if (this.versions.size > 1) span.classList.add(`v${this.versions.get(token.version) % 4}`);
    }
    if (this.differing.some(([start, end]) => start <= position && position < end)) span.classList.add("differs");
    return span;
  }

  inspect(position) {
    const token = position >= 0 ? this.token(position) : null;
    this.inspector.replaceChildren();
    if (!token) {
      this.inspector.append(element("span", "soft", position >= 0 ? "Loading…" : "Hover a token, or move with the arrow keys."));
      return;
    }
    const block = this.blocks[this.blockOf(position)];
    const facts = [
      ["token", JSON.stringify(token.text), "code"],
      ["id", token.id],
      ["position", number(position)],
    ];
    if (token.logprob === null) facts.push(["mask", "0, not sampled"]);
    else {
      const chance = Math.exp(token.logprob);
      facts.push(["log-prob", token.logprob.toFixed(4)]);
      facts.push(["probability", chance >= 0.0001 ? `${(chance * 100).toFixed(2)} %` : chance.toExponential(1)]);
      facts.push(["version", token.version ?? "unknown"]);
      facts.push(["mask", token.loss ? "1" : "0, trained elsewhere or not at all"]);
    }
    facts.push(["turn", block.turn]);
    for (const [name, value, className] of facts) {
      const fact = element("span", "fact");
      fact.append(element("i", "", name), element("b", className, String(value)));
      this.inspector.append(fact);
    }
  }

  // --- moving ---------------------------------------------------------------------------------------

  blockOf(position) {
    let low = 0;
    let high = this.blocks.length - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (this.blocks[middle].start <= position) low = middle;
      else high = middle - 1;
    }
    return low;
  }

  firstInSight() {
    return this.blocks[this.list.at(this.viewport.scrollTop + 40)]?.start ?? 0;
  }

  point(position, { scroll = true, where = "nearest" } = {}) {
    if (!this.row || !this.row.length) return;
    const before = this.cursor;
    this.cursor = Math.max(0, Math.min(position, this.row.length - 1));
    const i = this.blockOf(this.cursor);
    if (scroll && (where === "start" || !this.list.element(i))) this.list.scrollTo(i, where);
    document.getElementById(`token-${before}`)?.setAttribute("aria-selected", "false");
    const span = document.getElementById(`token-${this.cursor}`);
    span?.setAttribute("aria-selected", "true");
    if (scroll) span?.scrollIntoView({ block: "nearest" });
    this.viewport.setAttribute("aria-activedescendant", `token-${this.cursor}`);
    this.inspect(this.cursor);
    this.entered(this.blocks[i].turn);
  }

  // Put the first part of a turn at the top.
  goToTurn(turn, { sampled = false } = {}) {
    const i = this.blocks.findIndex((block) => block.turn === turn && (!sampled || block.sampled));
    if (i >= 0) this.point(this.blocks[i].start, { where: "start" });
  }

  step(parts) {
    const here = this.blocks[this.blockOf(Math.max(this.cursor, 0))];
    const turns = [...new Set(this.row.parts.map(([turn]) => turn))];
    const turn = turns[turns.indexOf(here.turn) + parts];
    if (turn !== undefined) this.goToTurn(turn);
  }

  line(direction) {
    const here = document.getElementById(`token-${this.cursor}`)?.getClientRects()[0];
    if (!here) return this.point(this.cursor < 0 ? this.firstInSight() : this.cursor);
    let best = null;
    for (let position = this.cursor + direction, seen = 0; seen < 600; position += direction, seen++) {
      const box = document.getElementById(`token-${position}`)?.getClientRects()[0];
      if (!box) break;
      const away = (box.top - here.top) * direction;
      if (away < 4) continue;
      if (best && Math.abs(box.top - best.top) > 4) break;
      const distance = Math.abs(box.left - here.left);
      if (!best || distance < best.distance) best = { position, distance, top: box.top };
    }
    this.point(best ? best.position : this.cursor + direction);
  }

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || !this.row) return;
    const steps = {
      ArrowRight: () => this.point(this.cursor + 1),
      ArrowLeft: () => this.point(this.cursor - 1),
      ArrowDown: () => this.line(1),
      ArrowUp: () => this.line(-1),
      Home: () => this.point(0),
      End: () => this.point(this.row.length - 1),
      PageDown: () => this.viewport.scrollBy(0, this.viewport.clientHeight - 60),
      PageUp: () => this.viewport.scrollBy(0, 60 - this.viewport.clientHeight),
    };
    if (!(event.key in steps)) return;
    event.preventDefault();
    steps[event.key]();
  }
}
