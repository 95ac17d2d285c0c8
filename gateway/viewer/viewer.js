// The viewer: sessions, the tree of one, and its rows. Texts of models and harnesses are set as text only.

import { ChoiceList, VirtualList } from "./virtual.js";
import { TokenPane, element, number, visible } from "./tokens.js";

const KEY = "titogym admin key"; // in sessionStorage: gone with the tab
const OPEN = "titogym session";
const THEME = "titogym colours";
const PAGE = 50; // mismatches of one request
const BEAT = 1000; // milliseconds between two looks at the open session
const LIST_BEATS = 5; // looks at it for each look at the list of sessions
const COMPARE = 8000; // milliseconds between two comparisons of a session that goes on: each renders it whole
const $ = (id) => document.getElementById(id);

// --- the gateway ------------------------------------------------------------------------------------

class Refused extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

async function ask(path) {
  const key = sessionStorage.getItem(KEY);
  let response;
  try {
    response = await fetch(path, { headers: key ? { Authorization: `Bearer ${key}` } : {}, cache: "no-store" });
  } catch {
    throw new Refused("The gateway does not answer.", 0);
  }
  if (response.ok) return response.json();
  const body = await response.json().catch(() => null);
  throw new Refused(body?.error?.message ?? `The gateway answered with status ${response.status}.`, response.status);
}

const asked = (id) => `sessions/${encodeURIComponent(id)}`;

function failed(error) {
  if (error.status === 401) return logIn("The gateway no longer accepts this key.");
  console.error(error);
  $("toast").textContent = error.status === 404 ? "This session is gone from the gateway." : error.message;
  $("toast").hidden = false;
  clearTimeout(failed.timer);
  failed.timer = setTimeout(() => ($("toast").hidden = true), 6000);
}

// --- the key ----------------------------------------------------------------------------------------

function logIn(message = "") {
  sessionStorage.removeItem(KEY);
  $("app").hidden = true;
  $("login").hidden = false;
  $("login-message").textContent = message;
  $("key").value = "";
  $("key").focus();
}

$("login").addEventListener("submit", async (event) => {
  event.preventDefault();
  const key = $("key").value.trim();
  // What a header cannot carry cannot be a key.
  if (!/^[\x20-\x7e]+$/.test(key)) return logIn("A key is made of plain letters, digits and signs.");
  sessionStorage.setItem(KEY, key);
  await enter();
});

$("lock").addEventListener("click", () => {
  sessionStorage.clear();
  location.reload();
});

async function enter() {
  try {
    await loadSessions();
  } catch (error) {
    if (error.status !== 401) return logIn(error.message);
    return logIn(sessionStorage.getItem(KEY) ? "This is not the gateway's admin key." : "");
  }
  $("login").hidden = true;
  $("app").hidden = false;
  $("lock").hidden = !sessionStorage.getItem(KEY);
  showSessions();
  const last = sessionStorage.getItem(OPEN);
  if (last && sessions.some((session) => session.id === last)) await openSession(last);
  else $("session-list").focus();
}

// --- sessions ---------------------------------------------------------------------------------------

let sessions = []; // all, the latest used first
let found = []; // those that the search lets through
const summaries = new Map(); // id -> {turns, told}
let summarising = false;

// With `keep` the sessions that are known keep their places, and new ones come first.
async function loadSessions({ keep = false } = {}) {
  const places = new Map(keep ? sessions.map(({ id }, i) => [id, i]) : []);
  const place = (session) => places.get(session.id) ?? -1;
  sessions = (await ask("sessions")).sessions.sort((a, b) => place(a) - place(b) || b.touched - a.touched);
  for (const session of sessions) {
    session.tags = Object.entries(session.labels).map(([name, value]) => `${name}=${typeof value === "string" ? value : JSON.stringify(value)}`);
    session.words = [session.id, session.matcher, session.policy, ...session.tags].join(" ").toLowerCase();
  }
}

// `keep` is the id of the session that stays the current one, in a view that stays where it is.
function showSessions({ keep } = {}) {
  const words = $("search").value.toLowerCase().split(/\s+/).filter(Boolean);
  found = sessions.filter((session) => words.every((word) => session.words.includes(word)));
  $("count").textContent = found.length === sessions.length ? `${number(found.length)} sessions` : `${number(found.length)} of ${number(sessions.length)} sessions`;
  const at = found.findIndex((session) => session.id === (keep ?? shown?.id));
  sessionList.reset(found.length, at >= 0 ? at : found.length ? 0 : -1, { keep: keep !== undefined });
  if (!sessions.length) $("welcome-text").textContent = "No session yet. They appear here as agents use the gateway.";
}

const sessionList = new ChoiceList($("session-list"), {
  height: 72,
  role: "option",
  render: (i) => {
    const session = found[i];
    const made = element("div", `row ${session.id === shown?.id ? "open" : ""}`);
    const head = element("div", "line");
    head.append(element("b", "code", session.id.replace(/^sess_/, "")), element("span", "soft", ago(session.touched)));
    const tags = element("div", "line labels");
    if (session.tags.length) for (const tag of session.tags.slice(0, 4)) tags.append(element("span", "chip", visible(tag)));
    else tags.append(element("span", "soft", "no labels"));
    const foot = element("div", "line soft");
    const told = summaries.get(session.id)?.told;
    foot.append(element("span", "", plural(session.turns, "turn")));
    foot.append(element("span", "", told ? `${brief(told.row_tokens)} tokens` : "…"));
    if (told) foot.append(element("span", told.mismatches ? "warn" : "", told.mismatches ? `${brief(told.mismatches)} mismatch${told.mismatches === 1 ? "" : "es"}` : "exact"));
    made.append(head, tags, foot);
    if (!summarised(session)) summarise();
    return made;
  },
  move: () => {},
  open: (i) => openSession(found[i].id).catch(failed),
  right: (i) => i >= 0 && openSession(found[i].id).catch(failed),
});

// A session that goes on is not compared again for every turn.
function summarised(session) {
  const held = summaries.get(session.id);
  return held && (held.turns === session.turns || performance.now() - held.at < 2 * COMPARE);
}

// Ask for what the lines in sight still lack, one after the other: each makes the gateway compare a session.
async function summarise() {
  if (summarising) return;
  summarising = true;
  try {
    for (;;) {
      await new Promise((done) => setTimeout(done, 60));
      const inSight = [...sessionList.list.shown.keys()].map((i) => found[i]).filter(Boolean);
      const session = inSight.find((one) => !summarised(one));
      if (!session) break;
      const told = await ask(`${asked(session.id)}/summary`).catch((error) => {
        if (error.status === 404) return null;
        throw error;
      });
      summaries.set(session.id, { turns: session.turns, told, at: performance.now() });
      sessionList.list.refresh(found.indexOf(session));
    }
  } catch (error) {
    failed(error);
  } finally {
    summarising = false;
  }
}

$("search").addEventListener("input", () => showSessions());
$("search").addEventListener("keydown", (event) => {
  if (event.key !== "ArrowDown" && event.key !== "Enter") return;
  event.preventDefault();
  $("session-list").focus();
  if (event.key === "Enter" && found.length) openSession(found[0].id).catch(failed);
});

// --- one session ------------------------------------------------------------------------------------

let shown = null; // what the gateway tells of the open session
let order = []; // its turns as the tree shows them
let leafOf = []; // turn -> leaf whose row shows it
let leaves = []; // all leaves, the trained ones first
let versions = new Map();
let leaf = -1;
let mismatches = null;

async function openSession(id, { keep = false } = {}) {
  const told = await ask(`${asked(id)}/tree`);
  const turn = keep && shown?.id === id ? order[tree.current]?.id : undefined;
  shown = told;
  sessionStorage.setItem(OPEN, id);
  document.title = `${id} · titogym viewer`;
  arrange();
  mismatches = null;
  leaf = -1;
  $("welcome").hidden = true;
  $("session").hidden = $("tree-pane").hidden = false;
  $("app").classList.add("opened");
  sessionList.list.refreshAll();
  showHead();
  showDetails();
  countTurns();
  const at = turn === undefined ? order.findIndex((node) => leafOf[node.id] === leaves[0]?.id) : order.findIndex((node) => node.id === turn);
  tree.reset(order.length, Math.max(at, order.length ? 0 : -1), { keep });
  if (order.length) {
    tree.choose(tree.current, { quiet: true });
    if (!keep) $("tree").focus();
    await showTurn(order[tree.current].id);
  } else {
    tokens.clear();
    $("row-title").textContent = "The session has no turn yet.";
  }
  loadMismatches().catch(failed);
}

function countTurns() {
  $("tree-count").textContent = `${plural(shown.tree.length, "turn")}, ${plural(shown.counters.roots, "root")}`;
}

// Put the turns into the order of the tree, a fork one level deeper, and find the row that shows each.
function arrange() {
  const nodes = shown.tree;
  const children = new Map();
  for (const node of nodes) {
    if (!children.has(node.parent)) children.set(node.parent, []);
    children.get(node.parent).push(node.id);
  }
  order = [];
  const roots = children.get(null) ?? [];
  const stack = roots.map((id) => [id, 0]).reverse();
  while (stack.length) {
    const [id, level] = stack.pop();
    const node = nodes[id];
    const siblings = node.parent === null ? roots : children.get(node.parent);
    Object.assign(node, { level, siblings: node.parent === null ? 1 : siblings.length, branch: siblings.indexOf(id) + 1 });
    order.push(node);
    const below = children.get(id) ?? [];
    for (const child of below.toReversed()) stack.push([child, level + (below.length > 1 ? 1 : 0)]);
  }
  leaves = nodes.filter((node) => !children.has(node.id)).sort((a, b) => a.superseded - b.superseded || a.id - b.id);
  leafOf = [];
  for (const end of leaves) {
    for (let node = end; node && leafOf[node.id] === undefined; node = nodes[node.parent]) leafOf[node.id] = end.id;
  }
  versions = new Map();
  for (const node of nodes) for (const version of node.versions) if (!versions.has(version)) versions.set(version, versions.size);
}

function showHead() {
  $("session-id").textContent = shown.id;
  const labels = Object.entries(shown.spec.labels ?? {});
  $("labels").replaceChildren(...labels.map(([name, value]) => element("span", "chip", visible(`${name}=${typeof value === "string" ? value : JSON.stringify(value)}`))));
  const tiles = [
    ["turns", number(shown.turns)],
    ["sampled tokens", number(shown.sampled_tokens)],
    ["longest row", number(shown.counters.longest_row)],
    ["roots", number(shown.counters.roots)],
    ["trajectories", number(leaves.filter((node) => !node.superseded).length)],
    ["superseded", number(shown.counters.superseded)],
    ["mismatches", mismatches ? number(mismatches.total) : "…"],
  ];
  $("tiles").replaceChildren(
    ...tiles.map(([name, value]) => {
      const tile = element("div");
      tile.append(element("dt", "", name), element("dd", name === "mismatches" && mismatches?.total ? "warn" : "", value));
      return tile;
    }),
  );
  $("tab-mismatches").textContent = mismatches ? `Mismatches ${number(mismatches.total)}` : "Mismatches";
}

const tree = new ChoiceList($("tree"), {
  height: 50,
  role: "treeitem",
  render: (i) => {
    const node = order[i];
    const made = element("div", `row turn ${node.superseded ? "superseded" : ""} ${node.parent === null ? "is-root" : ""}`);
    made.setAttribute("aria-level", node.level + 1);
    made.style.setProperty("--level", Math.min(node.level, 12));
    const head = element("div", "line");
    head.append(element("b", "", String(node.id)));
    if (node.parent === null) head.append(element("span", "chip root", "root"));
    if (node.siblings > 1) head.append(element("span", "chip branch", "branch"));
    const calls = node.tool_calls.map((name) => `${name}()`).join(" ");
    head.append(element("span", "said", visible([node.content.replaceAll("\n", " "), calls].filter(Boolean).join(" ")) || "(nothing said)"));
    const foot = element("div", "line soft");
    if (node.superseded) foot.append(element("span", "warn", "superseded"));
    if (node.finish !== "stop") foot.append(element("span", "warn", node.finish));
    foot.append(element("span", "", `+${number(node.prompt_tokens)} given, ${number(node.output_tokens)} sampled`));
    if (versions.size > 1) foot.append(element("span", "", `version ${node.versions.join(", ")}`));
    made.append(head, foot);
    return made;
  },
  move: (i) => {
    clearTimeout(tree.pause);
    tree.pause = setTimeout(() => showTurn(order[i].id).catch(failed), 80); // a held key does not load every row
  },
  open: (i) => showTurn(order[i].id).then(() => $("tokens").focus()).catch(failed),
  left: () => $("session-list").focus(),
  right: () => {
    choosePanel("tokens");
    $("tokens").focus();
  },
});

// --- rows -------------------------------------------------------------------------------------------

const tokens = new TokenPane({
  viewport: $("tokens"),
  inspector: $("inspector"),
  fetchTokens: (node, start, end) => ask(`${asked(shown.id)}/rows/${node}/tokens?start=${start}&end=${end}`),
  told: (turn) => shown.tree[turn],
  entered: (turn) => {
    const i = order.findIndex((node) => node.id === turn);
    if (i >= 0 && i !== tree.current) tree.choose(i, { quiet: true });
  },
  failed,
});

async function showTurn(turn) {
  await showRow(leafOf[turn]);
  tokens.goToTurn(turn);
}

async function showRow(end) {
  if (end === leaf) return;
  const id = shown.id;
  const row = await ask(`${asked(id)}/rows/${end}`);
  if (id !== shown.id) return;
  leaf = end;
  tokens.show(row, versions);
  nameRow();
  markDiffering();
}

// What stands above the row.
function nameRow() {
  const end = leaf;
  const { row } = tokens;
  const at = leaves.findIndex((node) => node.id === end);
  const node = shown.tree[end];
  $("row-title").textContent =
    `${node.superseded ? "superseded turn" : "trajectory"} ${number(at + 1)} of ${number(leaves.length)}, to turn ${end}: ${number(row.length)} tokens`;
  $("previous-row").disabled = at <= 0;
  $("next-row").disabled = at >= leaves.length - 1;
  const some = [...versions].slice(0, 8); // of many versions the tokens themselves tell the rest
  $("versions").replaceChildren(...(versions.size > 1 ? some.map(([version, i]) => element("span", `t v${i % 4}`, `version ${version}`)) : []));
}

function otherRow(step) {
  const at = leaves.findIndex((node) => node.id === leaf) + step;
  if (!leaves[at]) return;
  showRow(leaves[at].id).then(() => tokens.point(0)).catch(failed);
}

$("previous-row").addEventListener("click", () => otherRow(-1));
$("next-row").addEventListener("click", () => otherRow(1));

// --- mismatches -------------------------------------------------------------------------------------

const mismatchList = new VirtualList($("mismatches"), { estimate: () => 240, render: (i) => mismatchCard(i) });

let compared = 0; // when

// With `keep` what is shown stays until something else is known.
async function loadMismatches({ keep = false } = {}) {
  const id = shown.id;
  compared = performance.now();
  if (!keep) {
    $("mismatch-state").textContent = "Rendering the conversation again, to compare…";
    mismatchList.reset(0);
  }
  const first = await ask(`${asked(id)}/mismatches?start=0&end=${PAGE}`);
  if (shown.id !== id) return;
  if (keep && mismatches?.total === first.total && JSON.stringify(mismatches.items.slice(0, PAGE)) === JSON.stringify(first.mismatches)) return;
  mismatches = { total: first.total, items: first.mismatches, asked: new Set([0]) };
  $("mismatch-state").textContent = first.total
    ? `${plural(first.total, "place")} where the exact row differs from a fresh rendering of the messages. The row is what was trained on.`
    : "None: the row is what a fresh rendering of the messages gives.";
  mismatchList.reset(first.total, { keep });
  showHead();
  markDiffering();
}

async function moreMismatches(page) {
  const held = mismatches;
  if (held.asked.has(page)) return;
  held.asked.add(page);
  const told = await ask(`${asked(shown.id)}/mismatches?start=${page * PAGE}&end=${(page + 1) * PAGE}`);
  told.mismatches.forEach((item, i) => (held.items[told.start + i] = item));
  if (held !== mismatches) return;
  mismatchList.refreshAll();
  markDiffering();
}

function markDiffering() {
  const here = (mismatches?.items ?? []).filter((item) => item && item.leaf === leaf);
  tokens.mark(here.map((item) => [item.at, item.at + Math.max(item.row_total, 1)]));
}

function mismatchCard(i) {
  const item = mismatches.items[i];
  const made = element("article", "mismatch");
  if (!item) {
    made.append(element("p", "soft", "Loading…"));
    moreMismatches(Math.floor(i / PAGE)).catch(failed);
    return made;
  }
  const head = element("div", "line");
  const jump = element("button", "link", `token ${number(item.at)}`);
  jump.type = "button";
  jump.title = "Show it in its trajectory";
  jump.addEventListener("click", () => {
    choosePanel("tokens");
    showRow(item.leaf)
      .then(() => {
        $("tokens").focus();
        tokens.point(item.at, { where: "start" });
      })
      .catch(failed);
  });
  head.append(
    element("b", "", `${i + 1}`),
    element("span", "chip warn", item.type.replaceAll("_", " ")),
    element("span", "soft", `message ${item.message}, ${item.role}`),
    jump,
  );
  const cause = element("p", "cause");
  cause.append(element("span", "soft", "Probable cause "), element("b", "", item.cause));
  const sides = element("div", "sides");
  sides.append(side("held", "Held: what the model saw or sampled", item, "row"), side("expected", "Expected: rendered again", item, "rendered"));
  made.append(head, cause, sides);
  if (item.message_text) {
    const message = element("details");
    message.append(element("summary", "", "The message"), element("pre", "", visible(item.message_text)));
    message.addEventListener("toggle", () => mismatchList.schedule());
    made.append(message);
  }
  return made;
}

function side(name, title, item, of) {
  const made = element("div", `side ${name}`);
  made.append(element("h3", "", `${title} · ${plural(item[`${of}_total`], "token")}`));
  const text = element("div", "text");
  text.append(element("span", "context", visible(item.before)));
  item[`${of}_texts`].forEach((shownText, i) => {
    const token = element("span", "t differs", visible(shownText) || "·");
    token.title = `id ${item[`${of}_ids`][i]}`;
    text.append(token);
  });
  if (!item[`${of}_total`]) text.append(element("span", "none", "nothing"));
  const more = item[`${of}_total`] - item[`${of}_ids`].length;
  if (more > 0) text.append(element("span", "none", `and ${number(more)} more`));
  text.append(element("span", "context", visible(item.after)));
  const ids = item[`${of}_ids`];
  made.append(text, element("p", "ids soft", ids.length ? `ids ${ids.slice(0, 24).join(" ")}${ids.length > 24 ? " …" : ""}` : "no ids"));
  return made;
}

// --- what goes on ------------------------------------------------------------------------------------

// New turns and sessions appear by themselves, where a person looks on: each view stays where it is.
let beats = 0;

async function follow() {
  if (!document.hidden && !$("app").hidden) {
    try {
      if (shown) await followSession();
      if (++beats % LIST_BEATS === 0) await followSessions();
      $("live").textContent = "· live";
    } catch (error) {
      $("live").textContent = "";
      if (error.status === 401) failed(error);
      else $("live").textContent = `· not live: ${error.message}`;
    }
  }
  setTimeout(follow, BEAT);
}

async function followSessions() {
  const before = JSON.stringify(sessions);
  await loadSessions({ keep: true });
  if (JSON.stringify(sessions) !== before) showSessions({ keep: found[sessionList.current]?.id });
}

async function followSession() {
  const { id, state } = shown;
  const told = await ask(`${asked(id)}/tree?unless=${state}`).catch((error) => {
    if (error.status === 404) return {}; // it is gone; what was loaded of it can still be read
    throw error;
  });
  if (shown.id !== id || shown.state !== state) return;
  if (told.tree) {
    const current = order[tree.current]?.id;
    const grown = told.tree.length > shown.tree.length;
    shown = told;
    arrange();
    showHead();
    showDetails();
    countTurns();
    const wasLast = current === leaf;
    if (grown && leaf >= 0) await followRow();
    if (shown !== told) return;
    const followed = wasLast && tokens.atEnd();
    const at = order.findIndex((node) => node.id === (followed ? leaf : current));
    tree.reset(order.length, at, { keep: true });
    if (followed) tree.choose(at, { quiet: true });
    if (grown && current === undefined) {
      tree.choose(0, { quiet: true });
      await showTurn(order[0].id);
    }
    stale ||= grown;
  }
  if (stale && performance.now() - compared > COMPARE) {
    stale = false;
    await loadMismatches({ keep: true });
  }
}

let stale = false; // whether turns came after the comparison

// The row that is shown, where it went on.
async function followRow() {
  const { id } = shown;
  const end = leafOf[leaf];
  if (end === leaf) return nameRow();
  const row = await ask(`${asked(id)}/rows/${end}`);
  if (shown.id !== id) return;
  leaf = end;
  tokens.grow(row, versions);
  nameRow();
  markDiffering();
}

// --- details ----------------------------------------------------------------------------------------

function showDetails() {
  const { diagnostics, spec } = shown;
  const told = (value) => (typeof value === "object" && value !== null ? JSON.stringify(value) : String(value));
  const tables = [
    ["Session", { id: shown.id, model: shown.model, family: shown.family, created: when(shown.created), "last used": when(shown.touched), "turns in flight": shown.in_flight }],
    ["Created with", Object.fromEntries(Object.entries(spec).filter(([name]) => name !== "labels"))],
    ["Request fields without effect", diagnostics.ignored],
    ["Answers that the harness sent back changed, by field", diagnostics.rewritten],
    ["Turns that lost their history, by the field that the harness changed", lostBy(diagnostics.divergence)],
    ["Refused or failed requests, by code", shown.errors],
    ["Last error", shown.last_error ?? {}],
    ["Requests of clients that went away or came again", { "given up": diagnostics.aborted, "joined a turn in flight": diagnostics.joined, "answered again": diagnostics.replayed }],
  ];
  $("panel-details").replaceChildren(
    ...tables.map(([title, facts]) => {
      const card = element("section", "card");
      card.append(element("h3", "", title));
      const entries = Object.entries(facts);
      const list = element("dl", "facts");
      for (const [name, value] of entries) list.append(element("dt", "", visible(name)), element("dd", "", visible(told(value))));
      card.append(entries.length ? list : element("p", "soft", "none"));
      return card;
    }),
  );
}

const lostBy = (found) => (found?.verdict ? { ...found.causes, "in short": found.verdict } : (found?.causes ?? {}));

// --- panels, keys, colours --------------------------------------------------------------------------

const PANELS = ["tokens", "mismatches", "details"];

function choosePanel(name) {
  for (const one of PANELS) {
    $(`panel-${one}`).hidden = one !== name;
    $(`tab-${one}`).setAttribute("aria-selected", String(one === name));
    $(`tab-${one}`).tabIndex = one === name ? 0 : -1;
  }
  tokens.list.layout();
  mismatchList.layout();
}

for (const name of PANELS) {
  $(`tab-${name}`).addEventListener("click", () => choosePanel(name));
  $(`tab-${name}`).addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    const next = PANELS[(PANELS.indexOf(name) + step + PANELS.length) % PANELS.length];
    choosePanel(next);
    $(`tab-${next}`).focus();
  });
}

const THEMES = ["system", "light", "dark"];

function colours(theme) {
  document.documentElement.dataset.theme = theme;
  $("theme").title = `Colours: ${theme} (t)`;
}

function nextTheme() {
  const theme = THEMES[(THEMES.indexOf(document.documentElement.dataset.theme) + 1) % THEMES.length];
  localStorage.setItem(THEME, theme);
  colours(theme);
}

async function refresh() {
  await loadSessions();
  showSessions({ keep: found[sessionList.current]?.id });
  if (shown) await openSession(shown.id, { keep: true });
}

function back() {
  const here = document.activeElement;
  if (here === $("search")) {
    if ($("search").value) {
      $("search").value = "";
      showSessions();
    }
    $("session-list").focus();
  } else if (here === $("tree") || !shown) $("session-list").focus();
  else if (here !== $("session-list")) {
    choosePanel("tokens");
    $("tree").focus();
  }
}

document.addEventListener("keydown", (event) => {
  if ($("app").hidden || $("help").open || event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "Escape") return back();
  if (event.target instanceof HTMLInputElement) return;
  const keys = {
    "/": () => ($("search").focus(), $("search").select()),
    "?": () => $("help").showModal(),
    r: () => refresh().catch(failed),
    t: nextTheme,
  };
  if (shown) {
    PANELS.forEach((name, i) => (keys[i + 1] = () => choosePanel(name)));
    keys["["] = () => tokens.row && tokens.step(-1);
    keys["]"] = () => tokens.row && tokens.step(1);
    keys["<"] = () => otherRow(-1);
    keys[">"] = () => otherRow(1);
  }
  if (!(event.key in keys)) return;
  event.preventDefault();
  keys[event.key]();
});

$("refresh").addEventListener("click", () => refresh().catch(failed));
$("theme").addEventListener("click", nextTheme);
$("ask-help").addEventListener("click", () => $("help").showModal());

// --- words ------------------------------------------------------------------------------------------

function plural(count, noun, ending = "s") {
  return `${number(count)} ${noun}${count === 1 ? "" : ending}`;
}

const brief = (value) => value.toLocaleString("en", { notation: "compact", maximumFractionDigits: 1 });

const when = (seconds) => new Date(seconds * 1000).toLocaleString();

function ago(seconds) {
  const passed = Math.max(0, Date.now() / 1000 - seconds);
  for (const [unit, size] of [["d", 86400], ["h", 3600], ["min", 60]]) {
    if (passed >= size) return `${Math.floor(passed / size)} ${unit} ago`;
  }
  return "just now";
}

colours(localStorage.getItem(THEME) ?? "system");
choosePanel("tokens");
enter().finally(follow);
