// Read vectors.json and report, as JSON, how every vector is read and what it is written as again.
import { readFileSync } from "node:fs";
import { Float, Malformed, decode, decodeTokens, encode, encodeTokens } from "./wire.mjs";

const vectors = JSON.parse(readFileSync(process.argv[2], "utf-8"));
const numbers = { inf: Infinity, "-inf": -Infinity };
const bytes = (hex) => Buffer.from(hex, "hex");

function refused(read) {
  try {
    read();
  } catch (error) {
    if (error instanceof Malformed) return error.message;
    throw error;
  }
  return null;
}

// As vectors.json writes values: structures are arrays, bytes and large integers objects.
function plain(value) {
  if (typeof value === "bigint") return { int: `${value}` };
  if (value instanceof Uint8Array) return { hex: Buffer.from(value).toString("hex") };
  if (value instanceof Float) return value.value;
  if (Array.isArray(value)) return value.map(plain);
  return value !== null && typeof value === "object" ? Object.values(value).map(plain) : value;
}

const fieldsOf = (message) => Object.fromEntries(Object.entries(message).map(([key, value]) => [key, plain(value)]));

const report = {
  messages: vectors.messages.map(({ hex }) => {
    const [message] = decode(bytes(hex));
    return { message: fieldsOf(message), hex: encode(message).toString("hex") };
  }),
  several: vectors.several.map(({ hex }) => decode(bytes(hex)).map(fieldsOf)),
  malformed: vectors.malformed.map(({ hex }) => refused(() => decode(bytes(hex)))),
  tokens: vectors.tokens.map(({ codec, count, dim, hex, written_from: from }) => {
    const written = Float32Array.from(from.flat(), (x) => (x === null ? NaN : (numbers[x] ?? x)));
    const read = [...decodeTokens(codec, bytes(hex), count, dim)];
    return {
      values: read.map((x) => (Number.isFinite(x) ? x : Number.isNaN(x) ? null : x > 0 ? "inf" : "-inf")),
      hex: encodeTokens(codec, written, count, dim).toString("hex"),
    };
  }),
  malformed_tokens: vectors.malformed_tokens.map(({ codec, count, dim, hex }) =>
    refused(() => decodeTokens(codec, bytes(hex), count, dim)),
  ),
};
process.stdout.write(JSON.stringify(report));
