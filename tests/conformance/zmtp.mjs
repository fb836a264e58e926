// A listener for ZMTP 3.1 with the mechanism NULL, as PROTOCOL.md, "ZMTP without libzmq", describes it.
import { EventEmitter } from "node:events";
import { createServer } from "node:net";

const GREETING = Buffer.alloc(64);
GREETING.set([0xff], 0);
GREETING.set([0x7f, 3, 1], 9);
GREETING.write("NULL", 12, "latin1");
const MORE = 1;
const LONG = 2;
const COMMAND = 4;
const HANDSHAKE_MS = 2000;
const MOST_FRAMES = 3; // more are malformed in any case; they are counted and not kept
const MOST_UNSENT = 64 << 20;

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

// One connection; emits "message" with its frames, and "end".
class Connection extends EventEmitter {
  constructor(socket, { maxFrame, silenceMs }) {
    super();
    this.socket = socket;
    this.maxFrame = maxFrame;
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
    socket.write(GREETING);
  }

  send(frames) {
    if (!this.ready || this.socket.destroyed || this.socket.writableLength > MOST_UNSENT) return false;
    frames.forEach((frame, i) => framed(i + 1 < frames.length ? MORE : 0, frame).forEach((part) => this.socket.write(part)));
    return true;
  }

  end() {
    this.socket.end();
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
      if (greeting[10] < 3 || mechanism !== "NULL") return this.socket.destroy();
      this.greeted = true;
      this.#command("READY", property("Socket-Type", "ROUTER"));
      return true;
    }
    const flags = this.#peek(1);
    if (!flags) return false;
    const head = this.#peek(flags[0] & LONG ? 9 : 2);
    if (!head) return false;
    const size = flags[0] & LONG ? Number(head.readBigUInt64BE(1)) : head[1];
    if (size > this.maxFrame || flags[0] & ~7 || (flags[0] & COMMAND && flags[0] & MORE)) return this.socket.destroy();
    if (this.length < head.length + size) return false;
    const kind = flags[0];
    this.#peek(head.length, { take: true });
    const body = size ? this.#peek(size, { take: true }) : Buffer.alloc(0);
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
    if (name === "READY") {
      if (!this.ready) clearTimeout(this.handshake);
      this.ready = true;
    } else if (name === "ERROR") this.socket.destroy();
    else if (name === "PING" && data.length >= 2) {
      if (data.readUInt16BE(0)) this.ttlMs = 100 * data.readUInt16BE(0);
      this.#command("PONG", data.subarray(2, 18));
    }
    return undefined;
  }

  #command(name, data) {
    framed(COMMAND, command(name, data)).forEach((part) => this.socket.write(part));
  }
}

// Listen at tcp://host:port; `onConnection` gets every connection before it has greeted.
export function listen(address, settings, onConnection) {
  const [, host, port] = /^tcp:\/\/\[?([^\]]+)\]?:(\d+)$/.exec(address);
  const connections = new Set();
  const server = createServer((socket) => {
    const connection = new Connection(socket, settings);
    connections.add(connection);
    connection.on("end", () => connections.delete(connection));
    onConnection(connection);
  });
  const timer = setInterval(() => connections.forEach((connection) => connection.watch()), 100);
  server.listen(Number(port), host);
  return {
    server,
    close() {
      clearInterval(timer);
      server.close();
      for (const connection of connections) connection.end();
    },
  };
}
