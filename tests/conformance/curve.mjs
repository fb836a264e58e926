// CURVE (RFC 26): the cryptography that node lacks, XSalsa20 and Poly1305, and the handshake of both sides.
import { createPrivateKey, createPublicKey, diffieHellman, generateKeyPairSync, randomBytes, timingSafeEqual } from "node:crypto";

// Keys are 32 bytes, and 40 characters of Z85 in files.

const Z85 = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#";

export function z85(text) {
  const bytes = Buffer.alloc((text.length / 5) * 4);
  for (let at = 0; at < text.length; at += 5) {
    bytes.writeUInt32BE([...text.slice(at, at + 5)].reduce((sum, one) => sum * 85 + Z85.indexOf(one), 0), (at / 5) * 4);
  }
  return bytes;
}

// The pair in a file that `ls-edge keys new` wrote.
export function keyPair(text) {
  const key = (name) => z85(new RegExp(`${name}-key = "(.{40})"`).exec(text)[1]);
  return { publicKey: key("public"), secretKey: key("secret") };
}

function newPair() {
  const { publicKey, privateKey } = generateKeyPairSync("x25519");
  const raw = (key, type) => key.export({ format: "der", type }).subarray(-32);
  return { publicKey: raw(publicKey, "spki"), secretKey: raw(privateKey, "pkcs8") };
}

function sharedKey(publicKey, secretKey) {
  const read = (make, type, prefix, raw) => make({ key: Buffer.concat([Buffer.from(prefix, "hex"), raw]), format: "der", type });
  const secret = diffieHellman({
    privateKey: read(createPrivateKey, "pkcs8", "302e020100300506032b656e04220420", secretKey),
    publicKey: read(createPublicKey, "spki", "302a300506032b656e032100", publicKey),
  });
  return hsalsa20(secret, Buffer.alloc(16));
}

// Salsa20 on 16 words: the constants, the key, and 16 bytes of input.

const SIGMA = [0x61707865, 0x3320646e, 0x79622d32, 0x6b206574];
const QUARTERS = [
  [0, 4, 8, 12], [5, 9, 13, 1], [10, 14, 2, 6], [15, 3, 7, 11],
  [0, 1, 2, 3], [5, 6, 7, 4], [10, 11, 8, 9], [15, 12, 13, 14],
];

function stateOf(key, input) {
  const word = (bytes, i) => bytes.readUInt32LE(4 * i);
  const k = [0, 1, 2, 3, 4, 5, 6, 7].map((i) => word(key, i));
  const n = [0, 1, 2, 3].map((i) => word(input, i));
  return Uint32Array.of(SIGMA[0], ...k.slice(0, 4), SIGMA[1], ...n, SIGMA[2], ...k.slice(4), SIGMA[3]);
}

function mixed(state) {
  const x = state.slice();
  const turn = (to, from, also, by) => {
    const sum = x[from] + x[also];
    x[to] ^= (sum << by) | ((sum >>> 0) >>> (32 - by));
  };
  for (let round = 0; round < 10; round++) {
    for (const [a, b, c, d] of QUARTERS) {
      turn(b, a, d, 7);
      turn(c, b, a, 9);
      turn(d, c, b, 13);
      turn(a, d, c, 18);
    }
  }
  return x;
}

const bytesOf = (words) => {
  const bytes = Buffer.alloc(4 * words.length);
  words.forEach((word, i) => bytes.writeUInt32LE(word, 4 * i));
  return bytes;
};

function hsalsa20(key, input) {
  const x = mixed(stateOf(key, input));
  return bytesOf([0, 5, 10, 15, 6, 7, 8, 9].map((i) => x[i]));
}

// The key stream of XSalsa20 over `text`, which begins behind the 32 bytes that authenticate it.
function xsalsa20(key, nonce, text) {
  const state = stateOf(hsalsa20(key, nonce.subarray(0, 16)), Buffer.concat([nonce.subarray(16), Buffer.alloc(8)]));
  const stream = Buffer.alloc(64 * Math.ceil((32 + text.length) / 64));
  for (let at = 0; at < stream.length; at += 64) {
    state[8] = at / 64;
    bytesOf(mixed(state).map((word, i) => word + state[i])).copy(stream, at);
  }
  return { first: stream.subarray(0, 32), text: Buffer.from(text.map((byte, i) => byte ^ stream[32 + i])) };
}

const little = (bytes) => BigInt(`0x${Buffer.from(bytes).reverse().toString("hex")}`);

function poly1305(key, text) {
  const [r, s] = [little(key.subarray(0, 16)) & 0x0ffffffc0ffffffc0ffffffc0fffffffn, little(key.subarray(16))];
  let sum = 0n;
  for (let at = 0; at < text.length; at += 16) {
    const part = text.subarray(at, at + 16);
    sum = ((sum + little(part) + (1n << BigInt(8 * part.length))) * r) % ((1n << 130n) - 5n);
  }
  const tag = (sum + s) & ((1n << 128n) - 1n);
  return Buffer.from(tag.toString(16).padStart(32, "0"), "hex").reverse();
}

function seal(key, nonce, text) {
  const box = xsalsa20(key, nonce, text);
  return Buffer.concat([poly1305(box.first, box.text), box.text]);
}

function open(key, nonce, box) {
  if (box.length < 16) throw new Error("a box without its tag");
  const { first, text } = xsalsa20(key, nonce, box.subarray(16));
  if (!timingSafeEqual(poly1305(first, box.subarray(16)), box.subarray(0, 16))) throw new Error("a box of another key");
  return text;
}

// The handshake. Commands are [name, data]; what is wrong throws, which ends the connection.

const short = (number) => {
  const bytes = Buffer.alloc(8);
  bytes.writeBigUInt64BE(number);
  return bytes;
};
const nonceOf = (prefix, end) => Buffer.concat([Buffer.from(prefix, "latin1"), end]);

class Curve {
  constructor(keys, metadata, [sends, receives]) {
    Object.assign(this, { keys, metadata, sends, receives, mine: newPair(), sent: 0n, received: 0n, ready: false });
  }

  // Boxes of messages, and of the commands with a nonce of eight bytes before them.
  box(prefix, key, text) {
    const number = short(++this.sent);
    return Buffer.concat([number, seal(key, nonceOf(prefix, number), text)]);
  }

  unbox(prefix, key, data) {
    const number = data.readBigUInt64BE(0);
    if (number <= this.received) throw new Error("a nonce that was used before");
    this.received = number;
    return open(key, nonceOf(prefix, data.subarray(0, 8)), data.subarray(8));
  }

  // Flags are those of a frame: 1 for more, 4 for a command, which is 2 inside of the box.
  seal(flags, body) {
    const text = Buffer.concat([Buffer.of((flags & 1) | ((flags & 4) >> 1)), body]);
    return Buffer.concat([Buffer.from("\x07MESSAGE"), this.box(`CurveZMQMESSAGE${this.sends}`, this.key, text)]);
  }

  open(frame) {
    if (frame.length < 33 || frame.subarray(0, 8).toString("latin1") !== "\x07MESSAGE") throw new Error("a frame without a box");
    const text = this.unbox(`CurveZMQMESSAGE${this.receives}`, this.key, frame.subarray(8));
    return { flags: (text[0] & 1) | ((text[0] & 2) << 1), body: text.subarray(1) };
  }
}

// The side that dials: it knows the key of the other.
export class CurveClient extends Curve {
  constructor(keys, serverKey, metadata) {
    super(keys, metadata, ["C", "S"]);
    this.serverKey = serverKey;
  }

  begin() {
    const box = this.box("CurveZMQHELLO---", sharedKey(this.serverKey, this.mine.secretKey), Buffer.alloc(64));
    return ["HELLO", Buffer.concat([Buffer.of(1, 0), Buffer.alloc(72), this.mine.publicKey, box])];
  }

  onCommand(name, data) {
    if (name === "WELCOME") {
      const text = open(sharedKey(this.serverKey, this.mine.secretKey), nonceOf("WELCOME-", data.subarray(0, 16)), data.subarray(16));
      const [theirs, cookie] = [text.subarray(0, 32), text.subarray(32)];
      this.key = sharedKey(theirs, this.mine.secretKey);
      const random = randomBytes(16);
      const vouched = Buffer.concat([this.mine.publicKey, this.serverKey]);
      const vouch = seal(sharedKey(theirs, this.keys.secretKey), nonceOf("VOUCH---", random), vouched);
      const all = Buffer.concat([this.keys.publicKey, random, vouch, this.metadata]);
      return ["INITIATE", Buffer.concat([cookie, this.box("CurveZMQINITIATE", this.key, all)])];
    }
    if (name !== "READY") throw new Error(`the command ${name}`);
    this.unbox("CurveZMQREADY---", this.key, data);
    this.ready = true;
    return null;
  }
}

// The side that listens: `admit` returns the name behind a key, or undefined.
export class CurveServer extends Curve {
  constructor(keys, admit, metadata) {
    super(keys, metadata, ["S", "C"]);
    this.admit = admit;
    this.cookie = randomBytes(96); // this connection stays in memory, so that it need not hold anything
  }

  begin() {
    return null;
  }

  onCommand(name, data) {
    if (name === "HELLO" && !this.key) {
      this.theirs = Buffer.from(data.subarray(74, 106));
      const key = sharedKey(this.theirs, this.keys.secretKey);
      this.unbox("CurveZMQHELLO---", key, data.subarray(106));
      this.key = sharedKey(this.theirs, this.mine.secretKey);
      const random = randomBytes(16);
      const text = Buffer.concat([this.mine.publicKey, this.cookie]);
      return ["WELCOME", Buffer.concat([random, seal(key, nonceOf("WELCOME-", random), text)])];
    }
    if (name !== "INITIATE" || !this.key) throw new Error(`the command ${name}`);
    if (!data.subarray(0, 96).equals(this.cookie)) throw new Error("another cookie");
    const text = this.unbox("CurveZMQINITIATE", this.key, data.subarray(96));
    const client = text.subarray(0, 32);
    const vouch = open(sharedKey(client, this.mine.secretKey), nonceOf("VOUCH---", text.subarray(32, 48)), text.subarray(48, 128));
    if (!vouch.equals(Buffer.concat([this.theirs, this.keys.publicKey]))) throw new Error("a vouch for another connection");
    this.name = this.admit(client);
    if (this.name === undefined) throw new Error("a key that is not in the file");
    this.ready = true;
    return ["READY", this.box("CurveZMQREADY---", this.key, this.metadata)];
  }
}
