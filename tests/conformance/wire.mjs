// Headers and tokens, as runtime/protocol/PROTOCOL.md describes them: MessagePack, the fields of each message, the codecs.

export class Malformed extends Error {}

// MessagePack. Floats are kept apart from integers, and integers above 2^53 are BigInt.

export class Float {
  constructor(value) {
    this.value = value;
  }
}

const MOST_NESTED = 32;
const utf8 = new TextDecoder("utf-8", { fatal: true, ignoreBOM: true });

class Reader {
  constructor(bytes) {
    this.bytes = bytes;
    this.view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
    this.at = 0;
  }

  take(length) {
    if (this.at + length > this.bytes.length) throw new Malformed("the header ends too early");
    this.at += length;
    return this.at - length;
  }

  unsigned(width) {
    const at = this.take(width);
    if (width === 8) return integer(this.view.getBigUint64(at));
    return width === 1 ? this.view.getUint8(at) : width === 2 ? this.view.getUint16(at) : this.view.getUint32(at);
  }

  signed(width) {
    const at = this.take(width);
    if (width === 8) return integer(this.view.getBigInt64(at));
    return width === 1 ? this.view.getInt8(at) : width === 2 ? this.view.getInt16(at) : this.view.getInt32(at);
  }

  data(length) {
    const at = this.take(length);
    return this.bytes.subarray(at, at + length);
  }

  text(length) {
    try {
      return utf8.decode(this.data(length));
    } catch (error) {
      if (error instanceof Malformed) throw error;
      throw new Malformed("text that is not UTF-8");
    }
  }

  array(length, depth) {
    if (length > this.bytes.length - this.at) throw new Malformed("an array longer than the header");
    return Array.from({ length }, () => this.value(depth + 1));
  }

  map(length, depth) {
    if (length > this.bytes.length - this.at) throw new Malformed("a map longer than the header");
    const map = new Map();
    for (let i = 0; i < length; i++) {
      const key = this.value(depth + 1);
      map.set(key, this.value(depth + 1));
    }
    return map;
  }

  value(depth = 0) {
    if (depth > MOST_NESTED) throw new Malformed("nested too deeply");
    const kind = this.unsigned(1);
    if (kind < 0x80) return kind;
    if (kind < 0x90) return this.map(kind & 15, depth);
    if (kind < 0xa0) return this.array(kind & 15, depth);
    if (kind < 0xc0) return this.text(kind & 31);
    if (kind >= 0xe0) return kind - 256;
    switch (kind) {
      case 0xc0: return null;
      case 0xc2: return false;
      case 0xc3: return true;
      case 0xc4: case 0xc5: case 0xc6: return this.data(this.unsigned(1 << (kind - 0xc4)));
      case 0xc7: case 0xc8: case 0xc9: return this.extension(this.unsigned(1 << (kind - 0xc7)));
      case 0xca: return new Float(this.view.getFloat32(this.take(4)));
      case 0xcb: return new Float(this.view.getFloat64(this.take(8)));
      case 0xcc: case 0xcd: case 0xce: case 0xcf: return this.unsigned(1 << (kind - 0xcc));
      case 0xd0: case 0xd1: case 0xd2: case 0xd3: return this.signed(1 << (kind - 0xd0));
      case 0xd4: case 0xd5: case 0xd6: case 0xd7: case 0xd8: return this.extension(1 << (kind - 0xd4));
      case 0xd9: case 0xda: case 0xdb: return this.text(this.unsigned(1 << (kind - 0xd9)));
      case 0xdc: case 0xdd: return this.array(this.unsigned(2 << (kind - 0xdc)), depth);
      case 0xde: case 0xdf: return this.map(this.unsigned(2 << (kind - 0xde)), depth);
      default: throw new Malformed(`format ${kind.toString(16)} of MessagePack`);
    }
  }

  extension(length) {
    return { extension: this.data(length + 1) };
  }
}

function integer(big) {
  return big >= BigInt(Number.MIN_SAFE_INTEGER) && big <= BigInt(Number.MAX_SAFE_INTEGER) ? Number(big) : big;
}

function pack(value, out) {
  if (value === null) out.push(Buffer.of(0xc0));
  else if (typeof value === "boolean") out.push(Buffer.of(value ? 0xc3 : 0xc2));
  else if (typeof value === "number" || typeof value === "bigint") packInteger(BigInt(value), out);
  else if (value instanceof Float) {
    const bytes = Buffer.alloc(9, 0xcb);
    bytes.writeDoubleBE(value.value, 1);
    out.push(bytes);
  } else if (typeof value === "string") {
    const text = Buffer.from(value, "utf-8");
    packLength(text.length, [0xa0, 31, 0xd9, 0xda], out);
    out.push(text);
  } else if (value instanceof Uint8Array) {
    packLength(value.length, [0, -1, 0xc4, 0xc5], out);
    out.push(value);
  } else if (Array.isArray(value)) {
    packLength(value.length, [0x90, 15, 0, 0xdc], out);
    for (const item of value) pack(item, out);
  } else {
    const entries = Object.entries(value);
    packLength(entries.length, [0x80, 15, 0, 0xde], out);
    for (const [key, item] of entries) {
      pack(key, out);
      pack(item, out);
    }
  }
}

function packLength(length, [fixed, most, one, two], out) {
  if (length <= most) out.push(Buffer.of(fixed | length));
  else if (one && length < 256) out.push(Buffer.of(one, length));
  else out.push(Buffer.of(two, length >> 8, length & 255));
}

function packInteger(value, out) {
  if (value >= 0n && value < 128n) return out.push(Buffer.of(Number(value)));
  const width = value < 1n << 8n ? 0 : value < 1n << 16n ? 1 : value < 1n << 32n ? 2 : 3;
  const bytes = Buffer.alloc(9);
  bytes.writeBigUInt64BE(value, 1);
  const body = bytes.subarray(9 - (1 << width));
  return out.push(Buffer.of(0xcc + width), body);
}

// What the tables say. A check returns the value as it is used, or throws.

const U64 = 2n ** 64n;

function int(bound, least = 0) {
  return (value) => {
    if (typeof value !== "number" && typeof value !== "bigint") throw new Malformed(`${show(value)} for an integer`);
    if (BigInt(value) < BigInt(least) || BigInt(value) >= BigInt(bound)) {
      throw new Malformed(`the number ${value}, from ${least} to ${BigInt(bound) - 1n} are allowed`);
    }
    return value;
  };
}

function text(most, printable = true) {
  return (value) => {
    if (typeof value !== "string") throw new Malformed(`${show(value)} for a text`);
    if ([...value].length > most) throw new Malformed(`a text longer than ${most} characters`);
    if (printable && /[\p{C}\p{Z}]/u.test(value.replaceAll(" ", ""))) throw new Malformed("a text that cannot be printed");
    return value;
  };
}

function name(value) {
  if (typeof value !== "string" || !/^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$/.test(value) || value.endsWith("\n")) {
    throw new Malformed(`${show(value)} for a name`);
  }
  return value;
}

function bool(value) {
  if (typeof value !== "boolean") throw new Malformed(`${show(value)} for true or false`);
  return value;
}

function id(value) {
  if (!(value instanceof Uint8Array) || value.length !== 16) throw new Malformed(`${show(value)} for a request`);
  return value;
}

function bytes(lengths, least = 0, most = -1) {
  return (value) => {
    const length = value instanceof Uint8Array ? value.length : -1;
    if (!lengths.includes(length) && !(length >= least && length <= most)) throw new Malformed(`${show(value)} for bytes`);
    return value;
  };
}

function latency_weight(value) {
  const number = value instanceof Float ? value.value : typeof value === "boolean" ? NaN : Number(value ?? NaN);
  if (typeof value === "string" || !(number >= 0 && number <= 1e6)) throw new Malformed(`${show(value)} for a latency_weight`);
  return new Float(number);
}

function list(check, { most = Infinity, least = 0 } = {}) {
  return (value) => {
    if (!Array.isArray(value)) throw new Malformed(`${show(value)} for an array`);
    if (value.length > most || value.length < least) throw new Malformed(`an array of ${value.length} values`);
    return value.map(check);
  };
}

// An array whose values have names; one with `open` may have more at its end.
function row(spec, { open = true } = {}) {
  return (value) => {
    if (!Array.isArray(value)) throw new Malformed(`${show(value)} for an array`);
    if (!open && value.length !== spec.length) throw new Malformed(`an array of ${value.length} values`);
    return Object.fromEntries(
      spec.map(([key, check, fallback], index) => {
        if (index < value.length) return [key, check(value[index])];
        if (fallback === undefined) throw new Malformed(`an array without its value ${key}`);
        return [key, fallback];
      }),
    );
  };
}

function show(value) {
  if (value instanceof Float) return `the float ${value.value}`;
  if (value instanceof Uint8Array) return `${value.length} bytes`;
  return typeof value === "bigint" ? `${value}` : (JSON.stringify(value) ?? "something").slice(0, 40);
}

const u16 = int(65536);
const us = int(2 ** 32);
const u64 = int(U64);
const short = text(256);

const TRANSFER_ID = [["request", id], ["branch", u64], ["hop", int(65535)]];
const TRACK_ROW = [
  ["wave", u16], ["holder", name], ["blocks", list(u16)], ["begin_us", us], ["end_us", us], ["expected_us", us],
  ["queue_us", us, 0], ["engine_us", us, 0], ["codec_us", us, 0], ["why", short, ""],
];
const VISIT_ROW = [
  ["holder", name], ["blocks", list(u16)], ["queue_us", us], ["engine_us", us], ["codec_us", us], ["wait_us", us, 0],
  ["tracks", list(row(TRACK_ROW)), []],
];
const TRACK = [["wave", u64], ["index", u16], ["before", u16], ["origin", name]];
const RAN = [["block", u16], ["holder", name]];
const orNil = (check) => (value) => (value === null ? null : check(value));
const ITINERARY = [
  ["source", name], ["policy", short], ["remaining", list(u16)], ["max_skips", u16], ["via_source", bool, false],
  ["waves", list(list(list(row(RAN, { open: false }), { least: 1 }), { least: 1 })), []], ["skipped", list(u16), []],
  ["visits", list(row(VISIT_ROW)), []], ["relays", list(name), []], ["latency_weight", latency_weight, new Float(1)],
  ["waves_wanted", u16, 0], ["on_straggler", short, "later"], ["track", orNil(row(TRACK)), null],
  ["avoid", list(name, { most: 16 }), []], ["codec", short, ""], ["hand_to", short, ""],
];
const transfer = row(TRANSFER_ID, { open: false });
const budget = int(600_000_001);
const size = int(2 ** 20 + 1, 1);
const u40 = int(2 ** 40);
const digest = bytes([32]);
const digestOrNone = bytes([0, 32]);
const FINDING = [["status", short], ["what", short], ["detail", short], ["fix", short, ""]];
const NONE = new Uint8Array(0);
const u32 = int(2 ** 32);
const FILE_VERSION = [["version", u32], ["digest", digest]];
const DESCRIPTION = [
  ["name", name], ["role", short], ["incarnation", u64], ["minor", u16], ["model_id", short], ["bundle_id", short],
  ["blocks", list(u16), []], ["engine", short, ""], ["codec", short, "raw"],
  ["files", list(row(FILE_VERSION), { most: 8 }), []],
];
const LEFT_OUT = Symbol("left out"); // of a field that is not written unless it has a value
const MESSAGES = {
  hello: DESCRIPTION,
  welcome: DESCRIPTION,
  state: [
    ["warm", bool], ["draining", bool], ["stuck", bool], ["credits", u16], ["queue", u16], ["calls", u64],
    ["block_us", us], ["wait_us", us, 0], ["reaches", list(name), []], ["reach_blocks", list(u16), []],
    ["far_blocks", list(list(u16), { most: 6 }), []],
  ],
  bye: [["reason", short, ""]],
  run: [
    ["transfer", transfer], ["budget_us", budget], ["itinerary", itinerary], ["codec", short], ["count", size],
    ["dim", size], ["returning", short, ""], ["bundle_id", short, LEFT_OUT],
  ],
  accept: [["transfer", transfer], ["credits", u16]],
  refuse: [["transfer", transfer], ["reason", short], ["credits", u16, 0]],
  progress: [["transfer", transfer], ["blocks_done", u16]],
  release: [["transfer", transfer], ["holder", name], ["link_us", us, 0]],
  moved: [["transfer", transfer], ["before", name]],
  cancel: [["requests", list(id, { most: 1024 })], ["budget_us", budget]],
  complaint: [["what", text(4096, false)], ["model_id", short, ""]],
  offer: [
    ["manifest", digest], ["size", int(16_777_217)], ["file", digestOrNone, NONE], ["file_size", u40, 0],
    ["version", u32, 0],
  ],
  want: [["digest", digest], ["offset", u40], ["size", int(49_153, 1)]],
  chunk: [["digest", digest], ["offset", u40], ["data", bytes([], 1, 49_152)]],
  install: [["manifest", digest], ["ends_change", bool, false]],
  inspect: [["measure_ms", int(60_001), 0]],
  findings: [["rows", list(row(FINDING), { most: 64 })], ["profile", bytes([], 0, 60_000), NONE]],
  stored: [
    ["state", short], ["manifest", digestOrNone, NONE], ["active", digestOrNone, NONE], ["previous", digestOrNone, NONE],
    ["parts", u16, 0], ["size", u40, 0], ["missing", u40, 0], ["reason", short, ""],
    ["built", u16, 0], ["total", u16, 0], ["step", short, ""],
    ["behind", list(name, { most: 64 }), []],
  ],
};

function itinerary(value) {
  const read = row(ITINERARY)(value);
  const blocks = [...steps(read).map(({ block }) => block), ...read.remaining, ...read.skipped];
  if (new Set(blocks).size !== blocks.length) throw new Malformed("an itinerary that names a block twice");
  return read;
}

export function steps({ waves }) {
  return waves.flat(2);
}

const MAGIC = Buffer.from("LS\x01", "latin1");
const LONGEST_HEADER = 65536;

const MOST_TOGETHER = 64;

// Read a header: objects with the kind of the message as `t`. Throws Malformed.
export function decode(header) {
  if (header.length > LONGEST_HEADER) throw new Malformed(`a header of ${header.length} bytes`);
  if (header.length < 4 || header[0] !== MAGIC[0] || header[1] !== MAGIC[1]) throw new Malformed("not a message of ls-edge");
  if (header[2] !== MAGIC[2]) throw new Malformed(`version ${header[2]} of the protocol, and this is version 1`);
  const reader = new Reader(header.subarray(3));
  const value = reader.value();
  if (reader.at !== reader.bytes.length) throw new Malformed("something behind the message");
  if (!Array.isArray(value)) return [messageOf(value)];
  if (!value.length || value.length > MOST_TOGETHER) throw new Malformed(`a header of ${value.length} messages`);
  return value.map(messageOf);
}

function messageOf(map) {
  if (!(map instanceof Map)) throw new Malformed("a header that is not a map");
  for (const key of map.keys()) if (typeof key !== "string") throw new Malformed(`the key ${show(key)}`);
  const kind = map.get("t");
  const spec = typeof kind === "string" && Object.hasOwn(MESSAGES, kind) ? MESSAGES[kind] : undefined;
  if (!spec) throw new Malformed(`the kind of message ${show(kind)}`);
  const message = { t: kind };
  for (const [key, check, fallback] of spec) {
    if (map.has(key)) message[key] = check(map.get(key));
    else if (fallback === undefined) throw new Malformed(`${kind} without ${key}`);
    else if (fallback !== LEFT_OUT) message[key] = fallback;
  }
  return message;
}

export function encode(message) {
  const out = [MAGIC];
  const { t, ...fields } = message;
  const entries = MESSAGES[t].map(([key, , fallback]) => [key, fields[key] ?? fallback]).filter(([, value]) => value !== LEFT_OUT);
  pack({ t, ...Object.fromEntries(entries.map(([key, value]) => [key, rows(value)])) }, out);
  return Buffer.concat(out);
}

// Structures are arrays on the wire; their keys stand in the order of their tables.
function rows(value) {
  if (Array.isArray(value)) return value.map(rows);
  if (value === null || typeof value !== "object" || value instanceof Uint8Array || value instanceof Float) return value;
  return Object.values(value).map(rows);
}

// Tokens.

const BYTES = { raw: (n, d) => 4 * n * d, fp16: (n, d) => 2 * n * d, int8: (n, d) => 4 * n + n * d };

export function decodeTokens(codec, frame, count, dim) {
  if (!Object.hasOwn(BYTES, codec)) throw new Malformed(`the codec ${codec}`);
  if (frame.length !== BYTES[codec](count, dim)) throw new Malformed(`${frame.length} bytes of tokens as ${codec}`);
  const view = new DataView(frame.buffer, frame.byteOffset, frame.byteLength);
  return Float32Array.from({ length: count * dim }, (_, i) => {
    if (codec === "raw") return view.getFloat32(4 * i, true);
    if (codec === "fp16") return fromHalf(view.getUint16(2 * i, true));
    return view.getInt8(4 * count + i) * view.getFloat32(4 * Math.floor(i / dim), true);
  });
}

export function encodeTokens(codec, tokens, count, dim) {
  const frame = Buffer.alloc(BYTES[codec](count, dim));
  if (codec === "raw") tokens.forEach((x, i) => frame.writeFloatLE(x, 4 * i));
  if (codec === "fp16") tokens.forEach((x, i) => frame.writeUInt16LE(toHalf(Math.min(65504, Math.max(-65504, x))), 2 * i));
  if (codec === "int8") {
    for (let n = 0; n < count; n++) {
      const token = tokens.subarray(n * dim, (n + 1) * dim);
      const most = token.reduce((a, x) => (Number.isNaN(a) || Number.isNaN(x) ? NaN : Math.max(a, Math.abs(x))), 1e-30);
      const scale = Number.isFinite(most) ? Math.fround(Math.fround(most) / 127) : NaN;
      frame.writeFloatLE(scale, 4 * n);
      token.forEach((x, i) => {
        frame.writeInt8(Number.isNaN(scale) ? 0 : nearest(Math.fround(x / scale)), 4 * count + n * dim + i);
      });
    }
  }
  return frame;
}

// The nearest integer, ties to the even one.
function nearest(x) {
  const below = Math.floor(x);
  if (x - below !== 0.5) return Math.round(x);
  return below % 2 === 0 ? below : below + 1;
}

function fromHalf(bits) {
  const sign = bits & 0x8000 ? -1 : 1;
  const exponent = (bits >> 10) & 31;
  const fraction = bits & 1023;
  if (exponent === 31) return fraction ? NaN : sign * Infinity;
  return sign * (exponent ? 2 ** (exponent - 15) * (1 + fraction / 1024) : 2 ** -14 * (fraction / 1024));
}

function toHalf(x) {
  if (Number.isNaN(x)) return 0x7e00;
  const sign = x < 0 || Object.is(x, -0) ? 0x8000 : 0;
  const size = Math.abs(x);
  if (size < 2 ** -14) return sign | nearest(size * 2 ** 24);
  const exponent = Math.floor(Math.log2(size));
  const exact = 2 ** exponent > size ? exponent - 1 : 2 ** (exponent + 1) <= size ? exponent + 1 : exponent;
  return sign | (((exact + 15) << 10) + nearest((size / 2 ** exact - 1) * 1024));
}
