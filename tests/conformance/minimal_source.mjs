// A minimal source, written from runtime/protocol/PROTOCOL.md ("Minimal source"): it has images, and neither a model nor a decoder.
//
//     node minimal_source.mjs PEERS NAME SECRET_KEY IMAGE...
//
// PEERS is a peers.yaml that is also JSON; without keys in it, SECRET_KEY is "-". A line of JSON for each image has its logits and
// the parts that ran with their holders, or an error. The exit code is 1 if there was one.
import { randomBytes } from "node:crypto";
import { readFileSync } from "node:fs";
import { setTimeout as sleep } from "node:timers/promises";
import { keyPair, z85 } from "./curve.mjs";
import { Malformed, decode, decodeTokens, encode, steps } from "./wire.mjs";
import { dial } from "./zmtp.mjs";

const [STEM, HEAD, PIECE] = [65534, 65535, 49_152];
const [BUDGET_MS, NO_NEWS_MS, REDIAL_MS] = [20_000, 1500, 300];
const [MANIFEST_MS, ANOTHER_MS] = [10_000, 1000]; // for the manifest of one peer, and then of a second one

const [peersPath, ownName, keyPath, ...images] = process.argv.slice(2);
const file = JSON.parse(readFileSync(peersPath, "utf-8"));
const keys = keyPath === "-" ? null : keyPair(readFileSync(keyPath, "utf-8"));
const incarnation = randomBytes(8).readBigUInt64BE();
const requests = new Map(); // id in hexadecimal -> request
const now = () => performance.now();

// Link to all peers under an alias of our name; `onMessage` gets what is well formed. The links are dialed again until they are closed.
function linkAll(role, model, onMessage, maxFrame) {
  const name = `${ownName}.${randomBytes(4).toString("hex")}`;
  const links = file.peers.map((peer) => {
    const one = { peer: peer.name, blocks: [], warm: false, credits: 0, open: true };
    one.send = (message, payload) => one.link?.send([encode(message), ...(payload ? [payload] : [])]);
    const open = () => {
      one.link = dial(peer.address, { maxFrame, silenceMs: 2000 }, keys, keys && z85(peer.public_key));
      one.link.on("ready", () => one.send({ t: "hello", name, role, incarnation, minor: 0, model_id: model, bundle_id: "" }));
      one.link.on("message", ([header, ...payloads]) => {
        try {
          for (const message of decode(header)) onMessage(one, message, message.t === "run" ? payloads.shift() ?? Buffer.alloc(0) : undefined);
        } catch (error) {
          if (!(error instanceof Malformed)) throw error;
          one.send({ t: "complaint", what: error.message });
        }
      });
      one.link.on("end", () => {
        Object.assign(one, { warm: false, credits: 0 });
        for (const request of requests.values()) if (request.holder === one.peer) request.holder = null;
        if (one.open) setTimeout(open, REDIAL_MS).unref();
      });
    };
    open();
    return one;
  });
  const close = () => links.forEach((one) => {
    one.open = false;
    one.send({ t: "bye" });
    setTimeout(() => one.link.end(), 50); // so that BYE is read before the link ends
  });
  return { name, links, close };
}

// The manifest: what two peers agree on, or the only peer that sends one says.
async function fetchManifest() {
  const found = new Map();
  const parts = new Map();
  const observer = linkAll("observer", "", (one, message) => {
    if (message.t === "welcome") Object.assign(one, { welcome: message, raw: Buffer.alloc(0) });
    else if (message.t !== "chunk" || message.offset !== one.raw?.length) return;
    else one.raw = Buffer.concat([one.raw, message.data]);
    if (message.t === "chunk" && message.data.length < PIECE) {
      const manifest = JSON.parse(one.raw.toString("utf-8"));
      if (manifest.model_id === one.welcome.model_id) found.set(one.peer, manifest);
    } else one.send({ t: "want", digest: Buffer.from(one.welcome.bundle_id, "hex"), offset: one.raw.length, size: PIECE });
  }, 65_536);
  let until = now() + MANIFEST_MS;
  for (; found.size < 2 && now() < until; await sleep(10)) if (found.size) until = Math.min(until, now() + ANOTHER_MS);
  observer.close();
  if (!found.size) throw new Error("no peer has sent the manifest of its model");
  const [manifest, ...others] = found.values();
  const told = ({ model_id, classes }) => JSON.stringify([model_id, classes]);
  if (others.some((other) => told(other) !== told(manifest))) throw new Error("the peers do not agree on the model and its classes");
  return manifest;
}

const manifest = await fetchManifest();
const all = [STEM, ...manifest.parts.blocks.keys(), HEAD];
const source = linkAll("source", manifest.model_id, receive, Math.max(1 << 20, 4 * manifest.tokens.count * manifest.tokens.dim));

function receive(one, message, payload) {
  const request = message.transfer && requests.get(Buffer.from(message.transfer.request).toString("hex"));
  if (request && message.t !== "run") request.heard = now();
  const isCurrent = request?.branch === message.transfer?.branch;
  if (message.t === "welcome" || message.t === "hello") one.blocks = message.blocks;
  else if (message.t === "state") Object.assign(one, { warm: message.warm && !message.draining && !message.stuck, credits: message.credits });
  else if (request && isCurrent && (message.t === "moved" || message.t === "refuse")) request.holder = message.t === "moved" ? one.peer : null;
  else if (message.t === "run") takeHome(one, message, payload, request);
}

// Every transfer that comes home is accepted; the one with the most parts done is kept, or is the answer.
function takeHome(one, { transfer, itinerary, codec, count, dim, returning }, payload, request) {
  const ran = steps(itinerary);
  if (request) {
    const parts = [...ran.map(({ block }) => block), ...itinerary.remaining];
    const held = ran.every(({ block, holder }) => source.links.find(({ peer }) => peer === holder)?.blocks.includes(block));
    if (itinerary.skipped.length || parts.length !== all.length || all.some((part) => !parts.includes(part)) || !held) {
      throw new Malformed("an itinerary that cannot be of this request");
    }
    const isDone = !itinerary.remaining.length;
    const shape = isDone ? ["logits", 1, manifest.classes.length] : ["raw", manifest.tokens.count, manifest.tokens.dim];
    if (ran.length && [codec, count, dim].some((value, i) => value !== shape[i])) throw new Malformed(`${codec} of ${count} x ${dim}`);
    const values = ran.length ? decodeTokens("raw", payload, count, dim) : [];
    if (isDone && values.every(Number.isFinite)) end(request, { logits: [...values], steps: ran.map(({ block, holder }) => [block, holder]) });
    else if (returning.startsWith("no image")) end(request, { error: returning });
    else if (ran.length > steps(request.itinerary).length) Object.assign(request, { itinerary, codec, count, dim, payload });
    if (request.branch === transfer.branch) request.holder = null;
  }
  one.send({ t: "accept", transfer, credits: 1 });
}

function end(request, result) {
  requests.delete(request.id.toString("hex"));
  process.exitCode ||= result.error ? 1 : 0;
  console.log(JSON.stringify({ image: request.image, ...result }));
  for (const { send } of source.links) send({ t: "cancel", requests: [request.id], budget_us: BUDGET_MS * 1000 });
}

// Hand a request to a peer that has its next part; a new branch, so that an older one cannot be taken for it.
function offer(request) {
  const able = source.links.filter(({ warm, credits, blocks }) => warm && credits > 0 && blocks.includes(request.itinerary.remaining[0]));
  if (!able.length) return;
  const to = able[request.tries++ % able.length];
  to.credits -= 1;
  Object.assign(request, { branch: randomBytes(8).readBigUInt64BE(), holder: to.peer, heard: now() });
  const { id, branch, itinerary, codec, count, dim, payload } = request;
  const budget = Math.round(1000 * (request.deadline - now()));
  to.send({ t: "run", transfer: { request: id, branch, hop: 1 }, budget_us: budget, itinerary, codec, count, dim }, payload);
}

for (const image of images) {
  const [id, payload] = [randomBytes(16), readFileSync(image)];
  const itinerary = { source: source.name, policy: "nearest", remaining: all, max_skips: 0, via_source: false, waves: [] };
  requests.set(id.toString("hex"), { id, image, payload, itinerary, codec: "image", count: payload.length, dim: 1, deadline: now() + BUDGET_MS, holder: null, tries: 0 });
}
for (; requests.size; await sleep(10)) {
  for (const request of requests.values()) {
    if (now() >= request.deadline) end(request, { error: "the budget is over" });
    else if (request.holder === null || now() > request.heard + NO_NEWS_MS) offer(request);
  }
}
source.close();
