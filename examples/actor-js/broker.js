// What an actor asks of NATS, in plain requests as PROTOCOL.md spells them: it creates no stream and no consumer.
import { headers as makeHeaders } from "@nats-io/transport-node";
import { setTimeout as sleep } from "node:timers/promises";
import { digestOf, unpack } from "./records.js";

const PULL_MS = 2_000;
const ANSWER_MS = 5_000;
const REPEAT_MS = 500;
const HEADER_ROOM = 4_096;
const STREAM_IS_FULL = 10077;

export class Broker {
  constructor(connection, run) {
    this.connection = connection;
    this.run = run;
    this.room = connection.info.max_payload - HEADER_ROOM;
  }

  /** Asks until the server answers: it may be away for a while. Throws when it refuses, or the connection is closed. */
  async ask(subject, payload, options = {}) {
    for (;;) {
      try {
        return await this.connection.request(subject, payload, { timeout: ANSWER_MS, ...options });
      } catch (error) {
        if (this.connection.isClosed() || /permission/i.test(`${error.name} ${error.cause?.name}`)) throw error;
        console.error(`${subject}: ${error.message}, asking again`);
        await sleep(REPEAT_MS);
      }
    }
  }

  async api(call, body = {}) {
    return (await this.ask(`$JS.API.${call}`, JSON.stringify(body))).json();
  }

  /** Returns how long a lease lasts, once the controller has created the run's streams. */
  async leaseMs() {
    for (;;) {
      const { config, error } = await this.api(`CONSUMER.INFO.${this.run}_TICKETS.actors`);
      if (config) return config.ack_wait / 1e6;
      console.error(`run ${this.run}: ${error.description}, waiting for its controller`);
      await sleep(REPEAT_MS);
    }
  }

  /** Returns the record of a key, or undefined when nobody has set it. */
  async state(key, type = key) {
    const bucket = `${this.run}_STATE`;
    const { message } = await this.api(`STREAM.MSG.GET.KV_${bucket}`, { last_by_subj: `$KV.${bucket}.${key}` });
    return message && unpack(Buffer.from(message.data, "base64"), type);
  }

  /** Returns a ticket's message under a lease, or undefined when there is none for a while. */
  async pull() {
    const order = JSON.stringify({ batch: 1, expires: PULL_MS * 1e6 });
    const subject = `$JS.API.CONSUMER.MSG.NEXT.${this.run}_TICKETS.actors`;
    // `noMux`: the answer comes under the ticket's own subject, so that only its subscription tells whose it is.
    const message = await this.ask(subject, order, { timeout: PULL_MS + ANSWER_MS, noMux: true });
    if (!message.headers?.code) return message;
    if (message.headers.code !== 408) await sleep(REPEAT_MS); // 408: no ticket came within the time
  }

  extend = (message) => this.ask(message.reply, "+WPI");
  acknowledge = (message) => this.ask(message.reply, "+ACK");
  giveBack = (message, delayMs = 0) => this.ask(message.reply, `-NAK {"delay": ${delayMs * 1e6}}`);

  /** How often the ticket was delivered: in `$JS.ACK.STREAM.CONSUMER.N...`, or with a domain and an account before. */
  deliveries(message) {
    const words = message.reply.split(".");
    return Number(words.length < 12 ? words[4] : words[6]);
  }

  /** Publishes under an id until the message is stored. Returns `seq`, and `duplicate` when the id was known. */
  async publish(subject, id, payload, named = {}) {
    const headers = makeHeaders();
    for (const [name, value] of Object.entries({ "Nats-Msg-Id": id, ...named })) headers.set(name, String(value));
    for (;;) {
      const { error, ...stored } = (await this.ask(`${this.run}.${subject}`, payload, { headers })).json();
      if (!error) return stored;
      console.error(`${id} is not stored: ${error.description}`);
      if (error.err_code !== STREAM_IS_FULL && error.code < 500) throw new Error(error.description);
      await sleep(REPEAT_MS);
    }
  }

  /** Publishes a group; one that is too large for a message goes in parts, which count once they are joined. */
  async publishGroup(kind, id, payload) {
    if (payload.length <= this.room) return this.publish(`groups.${kind}`, id, payload);
    const digest = await digestOf([payload]);
    const count = Math.ceil(payload.length / this.room);
    for (let again = ""; ; ) {
      let first;
      for (let index = 0; index < count; index++) {
        const part = payload.subarray(index * this.room, (index + 1) * this.room);
        const { seq } = await this.publish("groups.part", `${id}.${digest.slice(0, 16)}.${index}${again}`, part);
        first ??= seq;
      }
      const { state } = await this.api(`STREAM.INFO.${this.run}_GROUPS`);
      if (first >= state.first_seq) {
        const named = { "Horizon-Parts": count, "Horizon-Digest": digest, "Horizon-First-Sequence": first };
        return this.publish("groups.joined", id, "", named);
      }
      again = `.again-${first}`;
    }
  }

  /** Keeps bytes that are no ticket for people to read. */
  async bury(message, reason) {
    const words = message.reply.split(".");
    const sequence = words.length < 12 ? words[5] : words[7];
    for (let offset = 0; offset === 0 || offset < message.data.length; offset += this.room) {
      const id = `dead-TICKETS-${sequence}${offset ? `.${offset}` : ""}`;
      await this.publish("dead.tickets", id, message.data.subarray(offset, offset + this.room), {
        "Horizon-Reason": reason.replace(/[^\x20-\x7e]+/g, " ").slice(0, 512),
        "Horizon-Subject": message.subject.slice(this.run.length + 1),
        "Horizon-Sequence": sequence,
        "Horizon-Offset": offset,
      });
    }
  }

  /** Returns the bytes that a manifest announces, chunk by chunk, or undefined when the stream no longer holds them. */
  async frame(manifest) {
    const version = `v${manifest.policy.version}.l${manifest.policy.lineage}`;
    const bytes = Buffer.alloc(manifest.weights_bytes);
    const stream = `STREAM.MSG.GET.${this.run}_WEIGHTS`;
    for (let seq = manifest.first_sequence; seq <= manifest.last_sequence; ) {
      const { message } = await this.api(stream, { seq, next_by_subj: `${this.run}.weights.frame` });
      if (!message) return undefined;
      const headers = readHeaders(Buffer.from(message.hdrs ?? "", "base64"));
      if (headers["horizon-policy"] === version) {
        Buffer.from(message.data ?? "", "base64").copy(bytes, Number(headers["horizon-offset"]));
      }
      seq = message.seq + 1;
    }
    return bytes;
  }
}

function readHeaders(bytes) {
  const lines = bytes.toString("latin1").split("\r\n").slice(1).filter(Boolean);
  return Object.fromEntries(lines.map((line) => line.split(": ")).map(([name, value]) => [name.toLowerCase(), value]));
}
