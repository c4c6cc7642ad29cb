// Records, ids and digests as PROTOCOL.md defines them. This file knows nothing of NATS.
import { createReadStream } from "node:fs";
import { readFile } from "node:fs/promises";
import { join } from "node:path";
import { decode, encode } from "@msgpack/msgpack";
import { createXXHash128 } from "hash-wasm";

export const pack = (type, body) => encode({ schema: 2, type, body });

/** Returns the body of a record, or throws when the bytes are not a record of this type. */
export function unpack(bytes, type) {
  const record = decode(bytes);
  if (record?.schema !== 2 || record.type !== type || typeof record.body !== "object") {
    throw new Error(`schema ${record?.schema}, type ${record?.type}: wanted a ${type} of schema 2`);
  }
  return record.body;
}

export const ticketId = (ticket) => `${ticket.kind}-${String(ticket.number).padStart(8, "0")}`;

/** The message id under which a ticket ends: its group or its void, whichever is stored first. */
export const endId = (ticket) => ticketId(ticket) + (ticket.signature ? `.${ticket.signature.slice(0, 32)}` : "");

// Typed arrays have the machine's byte order, which is little-endian wherever Node runs today.
export const int32 = (ids) => new Uint8Array(Int32Array.from(ids).buffer);
export const float32 = (numbers) => new Uint8Array(Float32Array.from(numbers).buffer);

/** Below zero when `a` is the earlier version: a resumed learner begins a new, later lineage. */
export const compareVersions = (a, b) => a.lineage - b.lineage || a.version - b.version;

export async function digestOf(pieces) {
  const hash = await createXXHash128();
  for await (const piece of pieces) hash.update(piece);
  return hash.digest("hex");
}

export const digestOfFile = (path) => digestOf(createReadStream(path));

/** What says which model and chat template a group's token ids are of. */
export async function identityOf(directory) {
  const digest = async (...names) => {
    const pieces = [];
    for (const name of names) {
      const content = await readFile(join(directory, name)).catch(() => null);
      pieces.push(Buffer.from(`${name} ${content ? content.length : "None"}\n`), content ?? Buffer.alloc(0));
    }
    return digestOf(pieces);
  };
  return {
    model_digest: await digest("config.json", "tokenizer.json"),
    template_digest: await digest("chat_template.jinja", "tokenizer_config.json"),
  };
}
