// A minimal peer, written from runtime/protocol/PROTOCOL.md ("Minimal peer"): it serves blocks, without joins or relays.
//
//     node minimal_peer.mjs PEERS NAME BUNDLE [SECRET_KEY]
//
// PEERS is a peers.yaml that is also JSON. With keys in it, SECRET_KEY is the file of the peer's own. A line of JSON says that it listens, is warm, or has left and what it did; SIGTERM drains.
import { createHash, randomBytes } from "node:crypto";
import { readFileSync } from "node:fs";
import { join } from "node:path";
import { keyPair, z85 } from "./curve.mjs";
import { openBlock } from "./onnx.mjs";
import { Malformed, decode, decodeTokens, encode, encodeTokens, steps } from "./wire.mjs";
import { listen } from "./zmtp.mjs";

const STATE_MS = 100;
const PROGRESS_MS = 80;
const HOME_AGAIN_MS = 2000;
const REFUSED_AGAIN_MS = 100;
const AWAY_MS = 1000;
const LEAVE_MS = 4700;
const COMPLAINTS_A_SECOND = 10;
const MOST_CANCELED = 10_000;

const [peersPath, ownName, bundlePath, keyPath] = process.argv.slice(2);
const file = JSON.parse(readFileSync(peersPath, "utf-8"));
const manifest = JSON.parse(readFileSync(join(bundlePath, "manifest.json"), "utf-8"));
const [STEM, HEAD] = [65534, 65535]; // parts that a peer without an image decoder does not serve
const numberOf = (part) => ({ stem: STEM, head: HEAD })[part] ?? part;
const blocksOf = new Map(file.peers.map((peer) => [peer.name, new Set(peer.blocks.map(numberOf))]));
const own = file.peers.find((peer) => peer.name === ownName);
const { count, dim } = manifest.tokens;
const modelBlocks = manifest.parts.blocks.length;
function bandOf(block) {
  if (block === STEM || block === HEAD) return block === STEM ? -1 : Infinity;
  return manifest.bands ? manifest.bands.findIndex((band) => band.includes(block)) : 0;
}
const credits = own.credits ?? 16;
const incarnation = randomBytes(8).readBigUInt64BE();

const served = new Set(own.blocks);
const engines = new Map();
const processes = new Map(); // name -> { role, links, codec, incarnation }
const complained = new Map(); // link -> [since when, how many]
const items = new Map(); // transfer of the RUN that brought it -> item
const onTheirWay = new Map(); // transfer of our RUN -> item
const canceled = new Map(); // owner and request -> until when
const queue = [];
const counts = { accepted: 0, refused: 0, blocks: 0, home: 0, complaints: 0 };
let warm = false;
let draining = false;
let calls = 0;
let blockUs = 0;

const keyOf = ({ request, branch, hop }) => `${Buffer.from(request).toString("hex")} ${branch} ${hop}`;
const cancelKey = (owner, request) => `${owner} ${Buffer.from(request).toString("hex")}`;
const ownerOf = ({ source, track }) => (track ? track.origin : source);
const done = ({ track }, ran) => (track ? track.before : 0) + ran.length;
const elapsedUs = (since) => Math.round((performance.now() - since) * 1000);
const finite = (tokens) => tokens.every(Number.isFinite);

// Sending.

function sendOn(link, message, payload) {
  return link.send([encode(message), ...(payload ? [payload] : [])]);
}

function send(name, message, payload) {
  return (processes.get(name)?.links ?? []).some((link) => sendOn(link, message, payload));
}

function complain(link, what, modelId = "") {
  counts.complaints += 1;
  const now = Date.now();
  let [since, said] = complained.get(link) ?? [now, 0];
  if (now - since >= 1000) [since, said] = [now, 0];
  complained.set(link, [since, said + 1]);
  if (said < COMPLAINTS_A_SECOND) sendOn(link, { t: "complaint", what: what.slice(0, 500), model_id: modelId });
}

function description(t) {
  const blocks = [...served].sort((a, b) => a - b);
  const { model_id, bundle_id } = manifest;
  const codec = own.codec ?? "raw";
  return { t, name: ownName, role: "peer", incarnation, minor: 0, model_id, bundle_id, blocks, engine: "javascript", codec };
}

function creditsFor(name) {
  if (!warm || draining) return 0;
  const most = processes.get(name)?.role !== "peer" ? credits - Math.floor(credits / 2) : credits;
  return Math.max(0, most - items.size);
}

function state(name) {
  return {
    t: "state", warm, draining, stuck: false, credits: creditsFor(name), queue: queue.length, calls, block_us: blockUs,
    wait_us: queue.length * blockUs, reaches: [], reach_blocks: [],
  };
}

function tellState() {
  for (const name of processes.keys()) send(name, state(name));
}

// Receiving.

function receive(link, frames) {
  try {
    const messages = decode(frames[0]);
    const payloads = frames.slice(1);
    if (payloads.length !== messages.filter(({ t }) => t === "run").length) throw new Malformed(`${messages.length} messages in ${frames.length} frames`);
    for (const message of messages) attempt(link, () => act(link, message, message.t === "run" ? payloads.shift() : undefined));
  } catch (error) {
    refuse(link, error);
  }
}

function attempt(link, action) {
  try {
    action();
  } catch (error) {
    refuse(link, error);
  }
}

function refuse(link, error) {
  if (!(error instanceof Malformed)) throw error;
  complain(link, `${error.message}; dropped`);
}

function act(link, message, payload) {
  if (message.t === "hello" || message.t === "welcome") return meet(link, message);
  if (message.t === "complaint") return console.error(`complaint: ${JSON.stringify(message.what)}`);
  const name = link.name;
  if (name === undefined) return complain(link, `${message.t} before hello; dropped`);
  if (processes.get(name).role === "observer" && message.t !== "bye") return complain(link, `${message.t} from an observer; dropped`);
  switch (message.t) {
    case "bye": return forget(name);
    case "run": return onRun(name, message, payload);
    case "accept": return onAccept(name, message);
    case "refuse": return onRefuse(name, message);
    case "cancel": return onCancel(name, message);
    default: return undefined; // state, progress, release and moved are of no use to a minimal peer
  }
}

function meet(link, said) {
  const why = reasonToRefuse(link, said);
  if (why && said.t === "welcome") return sendOn(link, { t: "bye", reason: why.slice(0, 200) });
  if (why) return complain(link, why, said.model_id === manifest.model_id ? "" : manifest.model_id);
  if (processes.get(said.name)?.incarnation !== said.incarnation) forget(said.name);
  const known = processes.get(said.name);
  const links = known?.links ?? [];
  const first = !links.includes(link);
  if (first) links.push(link);
  link.name = said.name;
  processes.set(said.name, { role: said.role, codec: said.codec, incarnation: said.incarnation, links });
  if (said.t === "hello") {
    sendOn(link, description("welcome"));
    if (first) sendOn(link, state(said.name));
  }
  for (const item of items.values()) if (item.atHome && !item.sent) goHome(item);
  return undefined;
}

function reasonToRefuse(link, { name, role, blocks, model_id: model }) {
  const owner = link.curve?.name;
  if (owner !== undefined && name !== owner && (role === "peer" || name.replace(/\.[0-9a-f]{8}$/, "") !== owner)) return `hello from ${name} with the key of ${owner}`;
  if (name === ownName || !["peer", "source", "observer"].includes(role)) return `hello from ${name}: not a process of ours`;
  if (role === "peer" && !blocksOf.has(name)) return `peer ${name} is not in peers.yaml`;
  if (role !== "peer" && blocksOf.has(name)) return `${role} ${name} has the name of a peer`;
  if (role !== "observer" && model !== manifest.model_id) return `${name} serves model ${model.slice(0, 16)}, this is ${manifest.model_id.slice(0, 16)}`;
  const given = role === "peer" ? blocksOf.get(name) : new Set();
  if (blocks.some((block) => !given.has(block))) return `${name} announces a block that peers.yaml does not give it`;
  if (processes.has(name) && processes.get(name).role !== role) return `hello from ${name} as ${role}, and it is linked in another role`;
  if (link.name !== undefined && link.name !== name) return `hello from ${name} on the link of ${link.name}`;
  return "";
}

function forget(name) {
  for (const link of processes.get(name)?.links ?? []) link.name = undefined;
  processes.delete(name);
}

function ended(link) {
  complained.delete(link);
  const known = processes.get(link.name);
  if (!known) return;
  known.links = known.links.filter((one) => one !== link);
  if (!known.links.length) forget(link.name);
  for (const item of items.values()) if (item.atHome && item.itinerary.source === link.name) goHome(item);
}

// Tokens come in.

function check(sender, { itinerary: it, count: n, dim: d, returning }) {
  if (n !== count || d !== dim) throw new Malformed(`tokens ${n} x ${d}, the model has ${count} x ${dim}`);
  const ran = steps(it).map(({ block }) => block);
  const blocks = [...ran, ...it.remaining, ...it.skipped];
  const ends = blocks.filter((block) => block === STEM || block === HEAD).length;
  if (ends && (it.track || ends !== 2)) throw new Malformed("an itinerary with stem or head alone");
  if (blocks.some((block) => block >= modelBlocks && block < STEM)) throw new Malformed("an itinerary with blocks that the model lacks");
  if (it.track) {
    if (!blocksOf.has(it.source) || it.track.before > modelBlocks) throw new Malformed(`a track for ${it.source}`);
  } else if (blocks.length !== modelBlocks + ends) throw new Malformed("an itinerary that lacks blocks");
  const order = [...ran, ...it.remaining].map(bandOf);
  const beside = it.waves.filter((wave) => wave.length > 1).map((wave) => wave.flat());
  const mixed = beside.some((track) => new Set(track.map(({ block }) => bandOf(block))).size > 1);
  if (mixed || order.some((band, at) => at && band < order[at - 1]) || (it.track && new Set(order).size > 1)) {
    throw new Malformed("an itinerary outside the bands");
  }
  if (it.skipped.length > it.max_skips) throw new Malformed("an itinerary with too many skips");
  if (processes.get(sender).role === "source" && (it.source !== sender || it.track || returning)) {
    throw new Malformed(`tokens of ${it.source}, sent by the source ${sender}`);
  }
}

function onRun(sender, run, payload) {
  const arrived = performance.now();
  check(sender, run);
  const { transfer, itinerary } = run;
  const tokens = decodeTokens(run.codec, payload, count, dim);
  const codecUs = elapsedUs(arrived);
  const key = keyOf(transfer);
  if (items.has(key)) return send(sender, { t: "accept", transfer, credits: creditsFor(sender) });
  const reason = reasonToRefuseRun(sender, run, tokens);
  if (reason) {
    counts.refused += 1;
    return send(sender, { t: "refuse", transfer, reason, credits: creditsFor(sender) });
  }
  const item = {
    key, transfer, sender, itinerary, wanted: itinerary.remaining, tokens, arrived,
    deadline: arrived + run.budget_us / 1000, codecUs, engineUs: 0, ran: [], returning: run.returning, atHome: false, sent: null, progressAt: arrived, awaySince: null,
  };
  items.set(key, item);
  counts.accepted += 1;
  send(sender, { t: "accept", transfer, credits: creditsFor(sender) });
  if (item.returning) return goHome(item);
  if (itinerary.source !== sender) send(itinerary.source, { t: "moved", transfer, before: sender });
  queue.push(item);
  if (queue.length === 1) setImmediate(compute);
  return undefined;
}

function reasonToRefuseRun(sender, { transfer, itinerary, returning, bundle_id: demanded }, tokens) {
  if ((canceled.get(cancelKey(ownerOf(itinerary), transfer.request)) ?? 0) > performance.now()) return "canceled";
  if (!finite(tokens)) return "not finite";
  if (!processes.has(itinerary.source)) return "busy";
  if (returning) return "";
  if (demanded && demanded !== manifest.bundle_id) return "other bundle";
  if (draining) return "draining";
  if (!warm) return "cold";
  return creditsFor(sender) > 0 ? "" : "busy";
}

// Blocks run, one at a time.

function nextBlock({ itinerary: it, wanted, ran }) {
  let next;
  const band = Math.min(...it.remaining.map(bandOf)); // of what may run now
  if (it.track || it.policy === "sequential") [next] = it.remaining;
  else if (ran.length) next = wanted[wanted.indexOf(ran.at(-1)) + 1];
  else next = it.remaining.find((block) => served.has(block) && bandOf(block) === band);
  return served.has(next) && bandOf(next) === band ? next : undefined;
}

function compute() {
  const item = queue[0];
  if (!item) return;
  const block = item.returning || item.dropped ? undefined : nextBlock(item);
  if (block === undefined) {
    queue.shift();
    if (!item.dropped) goHome(item);
  } else run(item, block);
  if (queue.length) setImmediate(compute);
}

function run(item, block) {
  const started = performance.now();
  const { itinerary: it } = item;
  try {
    const out = engines.get(block)(item.tokens, count, dim);
    if (!finite(out)) {
      item.returning = "not finite";
      return;
    }
    item.tokens = out;
  } catch (error) {
    console.error(`block ${block}: ${error.message}`);
    served.delete(block);
    for (const name of processes.keys()) send(name, description("hello"));
    return;
  }
  calls += 1;
  counts.blocks += 1;
  const took = elapsedUs(started);
  blockUs += Math.round((took - blockUs) / 10);
  item.engineUs += took;
  item.ran.push(block);
  const last = it.waves.at(-1);
  if (last?.length === 1) last[0].push({ block, holder: ownName });
  else it.waves.push([[{ block, holder: ownName }]]);
  it.remaining = it.remaining.filter((one) => one !== block);
  it.relays = [];
  queue.forEach(progress);
}

function progress(item) {
  if (performance.now() - item.progressAt < PROGRESS_MS) return;
  item.progressAt = performance.now();
  send(item.sender, { t: "progress", transfer: item.transfer, blocks_done: done(item.itinerary, steps(item.itinerary)) });
}

// And go home.

function goHome(item) {
  const { itinerary: it } = item;
  const now = performance.now();
  item.atHome = true;
  if (item.sent) onTheirWay.delete(keyOf(item.sent));
  const again = item.sent !== null || item.offered;
  item.sent = null;
  const codec = ["raw", "fp16", "int8"].includes(processes.get(it.source)?.codec) ? processes.get(it.source).codec : "raw";
  const stay = elapsedUs(item.arrived);
  const visit = {
    holder: ownName, blocks: item.ran, queue_us: Math.max(0, stay - item.engineUs), engine_us: item.engineUs,
    codec_us: item.codecUs, wait_us: 0, tracks: [],
  };
  const transfer = {
    request: item.transfer.request,
    branch: again ? randomBytes(8).readBigUInt64BE() : item.transfer.branch,
    hop: item.transfer.hop + 1,
  };
  const message = {
    t: "run", transfer, budget_us: Math.max(0, Math.round((item.deadline - now) * 1000)),
    itinerary: { ...it, visits: [...it.visits, visit] }, codec, count, dim,
    returning: item.returning || (it.remaining.length ? "unreachable" : "done"),
  };
  if (send(it.source, message, encodeTokens(codec, item.tokens, count, dim))) {
    Object.assign(item, { sent: transfer, offered: true, sentAt: now, awaySince: null });
    onTheirWay.set(keyOf(transfer), item);
  } else item.awaySince ??= now;
}

function onAccept(name, { transfer }) {
  const item = onTheirWay.get(keyOf(transfer));
  if (!item || item.itinerary.source !== name) return;
  counts.home += 1;
  send(item.sender, { t: "release", transfer: item.transfer, holder: name });
  drop(item);
}

function onRefuse(name, { transfer }) {
  const item = onTheirWay.get(keyOf(transfer));
  if (!item || item.itinerary.source !== name) return;
  item.sentAt = performance.now() - HOME_AGAIN_MS + REFUSED_AGAIN_MS;
}

function onCancel(name, { requests, budget_us: budget }) {
  const until = performance.now() + budget / 1000;
  for (const request of requests) canceled.set(cancelKey(name, request), until);
  while (canceled.size > MOST_CANCELED) canceled.delete(canceled.keys().next().value);
  const gone = new Set(requests.map((request) => cancelKey(name, request)));
  for (const item of items.values()) if (gone.has(cancelKey(ownerOf(item.itinerary), item.transfer.request))) drop(item);
}

function drop(item) {
  item.dropped = true;
  items.delete(item.key);
  if (item.sent) onTheirWay.delete(keyOf(item.sent));
}

// Time passes.

function lookAround() {
  const now = performance.now();
  for (const item of items.values()) {
    if (now >= item.deadline || (item.awaySince !== null && now - item.awaySince >= AWAY_MS)) drop(item);
    else if (item.sent && now - item.sentAt >= HOME_AGAIN_MS) goHome(item);
    else if (item.atHome && !item.sent) goHome(item);
  }
  for (const [key, until] of canceled) if (until <= now) canceled.delete(key);
  tellState();
}

function leave() {
  if (draining) return;
  draining = true;
  tellState();
  const since = performance.now();
  const timer = setInterval(() => {
    if (items.size && performance.now() - since < LEAVE_MS) return;
    clearInterval(timer);
    clearInterval(clock);
    for (const name of processes.keys()) send(name, { t: "bye", reason: "draining" });
    listener.close();
    process.stdin.destroy();
    console.log(JSON.stringify({ event: "left", ...counts }));
  }, 20);
}

async function load() {
  for (const block of served) {
    await new Promise(setImmediate); // connections come in meanwhile
    const part = manifest.parts.blocks[block];
    const bytes = readFileSync(join(bundlePath, part.file));
    if (createHash("sha256").update(bytes).digest("hex") !== part.sha256) throw new Error(`${part.file} has another digest`);
    engines.set(block, openBlock(bytes));
  }
  const zeros = new Float32Array(count * dim);
  for (let i = 0; i < 10; i++) {
    for (const engine of engines.values()) {
      await new Promise(setImmediate);
      engine(zeros, count, dim);
    }
  }
  const started = performance.now();
  for (const engine of engines.values()) engine(zeros, count, dim);
  blockUs = Math.max(1, Math.round(elapsedUs(started) / engines.size));
  warm = true;
  tellState();
  console.log(JSON.stringify({ event: "warm" }));
}

const heartbeat = { interval_ms: 100, timeout_ms: 1000, slowest_mbit: 1.0, ...file.heartbeat };
const silenceMs = heartbeat.timeout_ms + Math.ceil((4 * count * dim * 8e-3) / heartbeat.slowest_mbit);
const settings = { maxFrame: Math.max(65536, 4 * count * dim), silenceMs };
const named = [...file.peers, ...(file.sources ?? [])].filter((one) => one.public_key);
const nameOf = (key) => named.find((one) => z85(one.public_key).equals(key))?.name;
const onLink = (link) => {
  link.on("message", (frames) => receive(link, frames));
  link.on("end", () => ended(link));
};
const keys = keyPath && keyPair(readFileSync(keyPath, "utf-8"));
const listener = listen(own.bind ?? own.address, settings, onLink, keys, nameOf);
listener.server.on("listening", () => {
  console.log(JSON.stringify({ event: "listening" }));
  load();
});
listener.server.on("error", (error) => {
  console.error(`cannot listen: ${error.message}`);
  process.exit(1);
});
const clock = setInterval(lookAround, STATE_MS);
process.on("SIGTERM", leave);
// Whoever started it may be gone: then its standard input ends.
process.stdin.resume().on("end", leave);
