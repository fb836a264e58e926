// Just enough ONNX to run a block of a small vision transformer: a reader of the file and twelve operators.

// Protocol buffers: field number to all values that it has; nested messages are bytes.
function fields(bytes) {
  const found = new Map();
  let at = 0;
  const varint = () => {
    let value = 0n;
    for (let shift = 0n; ; shift += 7n) {
      const byte = bytes[at++];
      value |= BigInt(byte & 127) << shift;
      if (byte < 128) return BigInt.asIntN(64, value);
    }
  };
  while (at < bytes.length) {
    const key = Number(varint());
    let value;
    if ((key & 7) === 0) value = varint();
    else if ((key & 7) === 1) value = bytes.subarray(at, (at += 8));
    else if ((key & 7) === 2) {
      const length = Number(varint());
      value = bytes.subarray(at, (at += length));
    } else value = bytes.subarray(at, (at += 4));
    found.set(key >> 3, [...(found.get(key >> 3) ?? []), value]);
  }
  return { all: (number) => found.get(number) ?? [], one: (number) => found.get(number)?.[0] };
}

const string = (bytes) => Buffer.from(bytes ?? []).toString("utf-8");

function varints(values) {
  return values.flatMap((value) => {
    if (typeof value === "bigint") return [Number(value)];
    const packed = [];
    for (let at = 0; at < value.length; ) {
      let number = 0n;
      for (let shift = 0n; ; shift += 7n) {
        number |= BigInt(value[at] & 127) << shift;
        if (value[at++] < 128) break;
      }
      packed.push(Number(BigInt.asIntN(64, number)));
    }
    return packed;
  });
}

function tensor(bytes) {
  const read = fields(bytes);
  const shape = varints(read.all(1));
  const kind = Number(read.one(2));
  const raw = read.one(9);
  const view = raw && new DataView(raw.buffer, raw.byteOffset, raw.byteLength);
  const size = shape.reduce((a, b) => a * b, 1);
  let data;
  if (kind === 1 && raw) data = Array.from({ length: size }, (_, i) => view.getFloat32(4 * i, true));
  else if (kind === 7 && raw) data = Array.from({ length: size }, (_, i) => Number(view.getBigInt64(8 * i, true)));
  else if (kind === 7) data = varints(read.all(7));
  else if (kind === 1) data = read.all(4).flatMap((b) => Array.from({ length: b.length / 4 }, (_, i) => b.readFloatLE(4 * i)));
  else throw new Error(`tensors of type ${kind} are not supported`);
  return { name: string(read.one(8)), shape, data };
}

function attribute(bytes) {
  const read = fields(bytes);
  const kind = Number(read.one(20));
  const value = { 1: () => read.one(2).readFloatLE(0), 2: () => Number(read.one(3)), 3: () => string(read.one(4)), 7: () => varints(read.all(8)) };
  return [string(read.one(1)), value[kind]?.()];
}

const strides = (shape) => shape.map((_, i) => shape.slice(i + 1).reduce((a, b) => a * b, 1));
const sizeOf = (shape) => shape.reduce((a, b) => a * b, 1);

// Every index of a shape, with the offset that it has under other strides.
function offsets(shape, by) {
  const found = new Array(sizeOf(shape));
  const index = new Array(shape.length).fill(0);
  let offset = 0;
  for (let i = 0; i < found.length; i++) {
    found[i] = offset;
    for (let axis = shape.length - 1; axis >= 0; axis--) {
      offset += by[axis];
      if (++index[axis] < shape[axis]) break;
      offset -= by[axis] * shape[axis];
      index[axis] = 0;
    }
  }
  return found;
}

function broadcast(...shapes) {
  const rank = Math.max(...shapes.map((shape) => shape.length));
  const padded = shapes.map((shape) => [...new Array(rank - shape.length).fill(1), ...shape]);
  const shape = padded[0].map((_, axis) => Math.max(...padded.map((one) => one[axis])));
  return [shape, ...padded.map((one) => strides(one).map((stride, axis) => (one[axis] === 1 ? 0 : stride)))];
}

function each(a, b, combine) {
  const [shape, of_a, of_b] = broadcast(a.shape, b.shape);
  const [at_a, at_b] = [offsets(shape, of_a), offsets(shape, of_b)];
  return { shape, data: at_a.map((at, i) => combine(a.data[at], b.data[at_b[i]])) };
}

function matmul(a, b) {
  const [m, k] = a.shape.slice(-2);
  const n = b.shape.at(-1);
  const [outer, of_a, of_b] = broadcast(a.shape.slice(0, -2), b.shape.slice(0, -2));
  const [at_a, at_b] = [offsets(outer, of_a), offsets(outer, of_b)];
  const data = new Array(sizeOf(outer) * m * n);
  for (let batch = 0; batch < sizeOf(outer); batch++) {
    const [from_a, from_b] = [at_a[batch] * m * k, at_b[batch] * k * n];
    for (let i = 0; i < m; i++) {
      for (let j = 0; j < n; j++) {
        let sum = 0;
        for (let l = 0; l < k; l++) sum += a.data[from_a + i * k + l] * b.data[from_b + l * n + j];
        data[(batch * m + i) * n + j] = sum;
      }
    }
  }
  return { shape: [...outer, m, n], data };
}

function transpose(a, perm) {
  const by = strides(a.shape);
  const shape = perm.map((axis) => a.shape[axis]);
  return { shape, data: offsets(shape, perm.map((axis) => by[axis])).map((at) => a.data[at]) };
}

function slice(a, starts, ends, axes, steps) {
  const by = strides(a.shape);
  const shape = [...a.shape];
  let first = 0;
  (axes?.data ?? starts.data.map((_, i) => i)).forEach((given, i) => {
    const axis = given < 0 ? given + shape.length : given;
    if (steps && steps.data[i] !== 1) throw new Error("slices with steps are not supported");
    const bound = (x) => Math.min(a.shape[axis], Math.max(0, x < 0 ? x + a.shape[axis] : x));
    first += bound(starts.data[i]) * by[axis];
    shape[axis] = Math.max(0, bound(ends.data[i]) - bound(starts.data[i]));
  });
  return { shape, data: offsets(shape, by).map((at) => a.data[first + at]) };
}

function rowwise(a, turn) {
  const width = a.shape.at(-1);
  const data = [];
  for (let at = 0; at < a.data.length; at += width) data.push(...turn(a.data.slice(at, at + width)));
  return { shape: a.shape, data };
}

// The error function: a series without cancellation.
function erf(x) {
  if (Math.abs(x) > 6) return Math.sign(x);
  let [term, sum] = [x, x];
  for (let n = 1; Math.abs(term) > 1e-17 * Math.abs(sum); n++) sum += term *= (2 * x * x) / (2 * n + 1);
  return (2 / Math.sqrt(Math.PI)) * Math.exp(-x * x) * sum;
}

const OPERATORS = {
  Add: (_, a, b) => each(a, b, (x, y) => x + y),
  Sub: (_, a, b) => each(a, b, (x, y) => x - y),
  Mul: (_, a, b) => each(a, b, (x, y) => x * y),
  Div: (_, a, b) => each(a, b, (x, y) => x / y),
  MatMul: (_, a, b) => matmul(a, b),
  Transpose: ({ perm }, a) => transpose(a, perm ?? a.shape.map((__, i) => a.shape.length - 1 - i)),
  Slice: (_, ...inputs) => slice(...inputs),
  Squeeze: (_, a, axes) => {
    const gone = axes.data.map((axis) => (axis < 0 ? axis + a.shape.length : axis));
    return { shape: a.shape.filter((__, axis) => !gone.includes(axis)), data: a.data };
  },
  Reshape: (_, a, to) => {
    const shape = to.data.map((length, axis) => (length === 0 ? a.shape[axis] : length));
    const known = shape.filter((length) => length >= 0).reduce((x, y) => x * y, 1);
    return { shape: shape.map((length) => (length < 0 ? a.data.length / known : length)), data: a.data };
  },
  LayerNormalization: ({ axis = -1, epsilon = 1e-5 }, a, scale, bias) => {
    if (axis !== -1 && axis !== a.shape.length - 1) throw new Error("only the last axis is supported");
    return rowwise(a, (row) => {
      const mean = row.reduce((x, y) => x + y, 0) / row.length;
      const variance = row.reduce((x, y) => x + (y - mean) ** 2, 0) / row.length;
      return row.map((x, i) => ((x - mean) / Math.sqrt(variance + epsilon)) * scale.data[i] + (bias?.data[i] ?? 0));
    });
  },
  Softmax: ({ axis = -1 }, a) => {
    if (axis !== -1 && axis !== a.shape.length - 1) throw new Error("only the last axis is supported");
    return rowwise(a, (row) => {
      const most = Math.max(...row);
      const powers = row.map((x) => Math.exp(x - most));
      const sum = powers.reduce((x, y) => x + y, 0);
      return powers.map((x) => x / sum);
    });
  },
  Gelu: ({ approximate = "none" }, a) => {
    if (approximate !== "none") throw new Error("only the exact Gelu is supported");
    return { shape: a.shape, data: a.data.map((x) => 0.5 * x * (1 + erf(x / Math.SQRT2))) };
  },
};

// A block: tokens of [1, count, dim] in and out, as Float32Array.
export function openBlock(bytes) {
  const graph = fields(fields(bytes).one(7));
  const weights = new Map(graph.all(5).map((one) => tensor(one)).map((one) => [one.name, one]));
  const nodes = graph.all(1).map((one) => {
    const node = fields(one);
    const operator = string(node.one(4));
    if (!OPERATORS[operator]) throw new Error(`the operator ${operator} is not supported`);
    return {
      run: OPERATORS[operator],
      inputs: node.all(1).map(string),
      output: string(node.one(2)),
      attributes: Object.fromEntries(node.all(5).map(attribute)),
    };
  });
  const output = string(fields(graph.one(12)).one(1));
  return (tokens, count, dim) => {
    const values = new Map(weights);
    values.set("tokens", { shape: [1, count, dim], data: Array.from(tokens) });
    for (const { run, inputs, output: name, attributes } of nodes) {
      values.set(name, run(attributes, ...inputs.map((input) => (input ? values.get(input) : undefined))));
    }
    return Float32Array.from(values.get(output).data);
  };
}
