// ZMTP 3.1 with the mechanisms NULL and CURVE, as PROTOCOL.md, "ZMTP without libzmq", describes it.
import { EventEmitter } from "node:events";
import { connect, createServer } from "node:net";
import { CurveClient, CurveServer } from "./curve.mjs";

const MORE = 1;
const LONG = 2;
const COMMAND = 4;
const HANDSHAKE_MS = 2000;
const CURVE_MORE = 64; // bytes by which a frame is longer in its box
const MOST_FRAMES = 66; // a header, the tokens of 64 messages, and one too many; others are counted and not kept
const MOST_UNSENT = 64 << 20;

function greeting(mechanism, listens) {
  const bytes = Buffer.alloc(64);
  bytes.set([0xff], 0);
  bytes.set([0x7f, 3, 1], 9);
  bytes.write(mechanism, 12, "latin1");
  bytes[32] = mechanism === "CURVE" && listens ? 1 : 0;
  return bytes;
}

function property(name, value) {
  const body = Buffer.alloc(5 + name.length + value.length);
  body.writeUInt8(name.length, 0);
  body.write(name, 1, "latin1");
  body.writeUInt32BE(value.length, 1 + name.length);
  body.write(value, 5 + name.length, "latin1");
  return body;
}

function command(name, data) {
  return Buffer.concat([Buffer.of(name.length), Buffer.from(name, "latin1"), data]);
}

function framed(flags, body) {
  const head = body.length < 256 ? Buffer.of(flags, body.length) : Buffer.alloc(9);
  if (body.length >= 256) {
    head.writeUInt8(flags | LONG, 0);
    head.writeBigUInt64BE(BigInt(body.length), 1);
  }
  return [head, body];
}

// One connection; emits "ready", "message" with its frames, and "end". `curve` is its side of CURVE, null for NULL.
class Connection extends EventEmitter {
  constructor(socket, { maxFrame, silenceMs }, type, curve) {
    super();
    this.socket = socket;
    this.type = type;
    this.curve = curve;
    this.mechanism = curve ? "CURVE" : "NULL";
    this.maxFrame = maxFrame + (curve ? CURVE_MORE : 0);
    this.silenceMs = silenceMs;
    this.ttlMs = Infinity;
    this.chunks = [];
    this.length = 0;
    this.frames = [];
    this.greeted = false;
    this.ready = false;
    this.heard = Date.now();
    this.pinged = false;
    socket.setNoDelay(true);
    socket.on("data", (chunk) => this.#take(chunk));
    socket.on("error", () => socket.destroy());
    socket.on("close", () => {
      clearTimeout(this.handshake);
      this.emit("end");
    });
    this.handshake = setTimeout(() => socket.destroy(), HANDSHAKE_MS);
    socket.write(greeting(this.mechanism, type === "ROUTER"));
  }

  send(frames) {
    if (!this.ready || this.socket.destroyed || this.socket.writableLength > MOST_UNSENT) return false;
    frames.forEach((frame, i) => this.#frame(i + 1 < frames.length ? MORE : 0, frame));
    return true;
  }

  end() {
    this.socket.end();
  }

  #frame(flags, body) {
    const parts = this.ready && this.curve ? framed(0, this.curve.seal(flags, body)) : framed(flags, body);
    parts.forEach((part) => this.socket.write(part));
  }

  // Called now and then: who is silent for too long is asked, and then gone.
  watch(now = Date.now()) {
    const silent = now - this.heard;
    if (!this.ready) return;
    if (silent > Math.min(this.ttlMs, 2 * this.silenceMs)) this.socket.destroy();
    else if (silent > this.silenceMs && !this.pinged) {
      this.pinged = true;
      this.#command("PING", Buffer.of(0, 0));
    }
  }

  #take(chunk) {
    this.heard = Date.now();
    this.pinged = false;
    this.chunks.push(chunk);
    this.length += chunk.length;
    while (!this.socket.destroyed && this.#step());
  }

  // The first bytes of what has come, taken out if they are all there.
  #peek(length, { take = false } = {}) {
    if (this.length < length) return null;
    while (this.chunks.length > 1 && this.chunks[0].length < length) {
      let most = 0;
      const joined = [];
      while (this.chunks.length && most < length) {
        most += this.chunks[0].length;
        joined.push(this.chunks.shift());
      }
      this.chunks.unshift(Buffer.concat(joined));
    }
    const bytes = this.chunks[0].subarray(0, length);
    if (take) {
      this.length -= length;
      const rest = this.chunks.shift().subarray(length);
      if (rest.length) this.chunks.unshift(rest);
    }
    return bytes;
  }

  #step() {
    if (!this.greeted) {
      const start = this.#peek(Math.min(10, Math.max(1, this.length)));
      if (start && (start[0] !== 0xff || (start.length === 10 && start[9] !== 0x7f))) return this.socket.destroy();
      const greeting = this.#peek(64, { take: true });
      if (!greeting) return false;
      const mechanism = greeting.subarray(12, 32).toString("latin1").replace(/\0+$/, "");
      if (greeting[10] < 3 || mechanism !== this.mechanism) return this.socket.destroy();
      this.greeted = true;
      const first = this.curve ? this.curve.begin() : ["READY", metadata(this.type)];
      if (first) this.#command(...first);
      return true;
    }
    const flags = this.#peek(1);
    if (!flags) return false;
    const head = this.#peek(flags[0] & LONG ? 9 : 2);
    if (!head) return false;
    const size = flags[0] & LONG ? Number(head.readBigUInt64BE(1)) : head[1];
    if (size > this.maxFrame || flags[0] & ~7 || (flags[0] & COMMAND && flags[0] & MORE)) return this.socket.destroy();
    if (this.length < head.length + size) return false;
    let kind = flags[0];
    this.#peek(head.length, { take: true });
    let body = size ? this.#peek(size, { take: true }) : Buffer.alloc(0);
    if (this.ready && this.curve) {
      try {
        ({ flags: kind, body } = this.curve.open(body));
      } catch {
        return this.socket.destroy();
      }
    }
    if (kind & COMMAND) this.#onCommand(body);
    else if (!this.ready) this.socket.destroy();
    else {
      this.frames.push(this.frames.length < MOST_FRAMES ? body : null);
      this.frames.length = Math.min(this.frames.length, MOST_FRAMES);
      if (!(kind & MORE)) this.emit("message", this.frames.splice(0));
    }
    return true;
  }

  #onCommand(body) {
    if (body.length < 1 || body.length < 1 + body[0]) return this.socket.destroy();
    const name = body.subarray(1, 1 + body[0]).toString("latin1");
    const data = body.subarray(1 + body[0]);
    if (!this.ready && this.curve) {
      try {
        const reply = this.curve.onCommand(name, data);
        if (reply) this.#command(...reply);
        if (this.curve.ready) this.#onReady();
      } catch {
        this.socket.destroy();
      }
    } else if (name === "READY") this.#onReady();
    else if (name === "ERROR") this.socket.destroy();
    else if (name === "PING" && data.length >= 2) {
      if (data.readUInt16BE(0)) this.ttlMs = 100 * data.readUInt16BE(0);
      this.#command("PONG", data.subarray(2, 18));
    }
    return undefined;
  }

  #onReady() {
    if (this.ready) return;
    clearTimeout(this.handshake);
    this.ready = true;
    this.emit("ready");
  }

  #command(name, data) {
    this.#frame(COMMAND, command(name, data));
  }
}

const metadata = (type) => property("Socket-Type", type);

function endpoint(address) {
  const [, host, port] = /^tcp:\/\/\[?([^\]]+)\]?:(\d+)$/.exec(address);
  return { host, port: Number(port) };
}

// Dial tcp://host:port, with `keys` and the peer's public key where there are keys.
export function dial(address, settings, keys, peerKey) {
  const curve = keys ? new CurveClient(keys, peerKey, metadata("DEALER")) : null;
  const connection = new Connection(connect(endpoint(address)), settings, "DEALER", curve);
  const timer = setInterval(() => connection.watch(), 100);
  connection.on("end", () => clearInterval(timer));
  return connection;
}

// Listen at tcp://host:port; `onConnection` gets every connection before it has greeted. With `keys`, `admit` names who has a key.
export function listen(address, settings, onConnection, keys, admit) {
  const { host, port } = endpoint(address);
  const connections = new Set();
  const server = createServer((socket) => {
    const curve = keys ? new CurveServer(keys, admit, metadata("ROUTER")) : null;
    const connection = new Connection(socket, settings, "ROUTER", curve);
    connections.add(connection);
    connection.on("end", () => connections.delete(connection));
    onConnection(connection);
  });
  const timer = setInterval(() => connections.forEach((connection) => connection.watch()), 100);
  server.listen(port, host);
  return {
    server,
    close() {
      clearInterval(timer);
      server.close();
      for (const connection of connections) connection.end();
    },
  };
}
