// What an actor asks of NATS, in plain requests as PROTOCOL.md spells them: it creates no stream and no consumer.
import { headers as makeHeaders, PermissionViolationError } from "@nats-io/transport-node";
import { setTimeout as sleep } from "node:timers/promises";
import { digestOf, endId, unpack } from "./records.js";

const PULL_MS = 2_000;
const ANSWER_MS = 5_000;
const REPEAT_MS = 500;
const HEADER_ROOM = 4_096;
const NO_ROOM = [10077, 10047, 10023];

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
        const refused = [error, error.cause].some((each) => each instanceof PermissionViolationError);
        if (refused || this.connection.isClosed()) throw error;
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
    return Number(words[words.length === 9 ? 4 : 6]);
  }

  /** Publishes under an id until the message is stored. Returns `seq`, and `duplicate` when the id was known. */
  async publish(subject, id, payload, named = {}) {
    const headers = makeHeaders();
    for (const [name, value] of Object.entries({ "Nats-Msg-Id": id, ...named })) headers.set(name, String(value));
    for (;;) {
      const { error, ...stored } = (await this.ask(`${this.run}.${subject}`, payload, { headers })).json();
      if (!error) return stored;
      console.error(`${id} is not stored: ${error.description}`);
      if (!NO_ROOM.includes(error.err_code) && error.code < 500) throw new Error(error.description);
      await sleep(REPEAT_MS);
    }
  }

  /** Ends a ticket with a group or a void. Returns once an end of it is stored that the learner can read. */
  async end(ticket, subject, payload) {
    for (let id = endId(ticket); ; ) {
      const isWhole = payload.length <= this.room;
      const stored = isWhole ? await this.publish(subject, id, payload) : await this.#join(endId(ticket), id, payload);
      if (stored.duplicate ? !(await this.#isPassedOver(ticket, stored.seq)) : stored.readable !== false) return stored;
      id = `${endId(ticket)}.again-${stored.seq}`; // the end of that id ended nothing: its parts were gone
    }
  }

  /** Publishes in parts what is too large for a message. They count once they are joined, if none was purged before. */
  async #join(ownId, id, payload) {
    const digest = await digestOf([payload]);
    const count = Math.ceil(payload.length / this.room);
    for (let again = ""; ; ) {
      let first;
      for (let index = 0; index < count; index++) {
        const part = payload.subarray(index * this.room, (index + 1) * this.room);
        const { seq } = await this.publish("groups.part", `${ownId}.${digest.slice(0, 16)}.${index}${again}`, part);
        first ??= seq;
      }
      if (await this.#holds(first)) {
        const named = { "Horizon-Parts": count, "Horizon-Digest": digest, "Horizon-First-Sequence": first };
        const stored = await this.publish("groups.joined", id, "", named);
        return { ...stored, readable: await this.#holds(first) };
      }
      again = `.again-${first}`;
    }
  }

  async #holds(sequence) {
    return sequence >= (await this.api(`STREAM.INFO.${this.run}_GROUPS`)).state.first_seq;
  }

  /** The learner has read beyond the end that has the ticket's id, and the ticket is still open. */
  async #isPassedOver({ kind, number }, sequence) {
    const progress = await this.state("progress");
    if (!progress || progress.cursor < sequence) return false;
    const ended = [[0, (progress.lowest_unsettled?.[kind] ?? 0) - 1], ...(progress.ended_ranges?.[kind] ?? [])];
    return !ended.some(([first, last]) => first <= number && number <= last);
  }

  /** Keeps bytes that are no ticket for people to read. */
  async storeDeadLetter(message, reason) {
    const words = message.reply.split(".");
    const sequence = words[words.length === 9 ? 5 : 7];
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

  /** Returns the bytes that a manifest announces. The caller verifies them: a newer frame may have replaced these. */
  async frame({ policy, weights_bytes, first_sequence, last_sequence }) {
    const version = `v${policy.version}.l${policy.lineage}`;
    const bytes = Buffer.alloc(weights_bytes);
    for (let seq = first_sequence; seq <= last_sequence; seq++) {
      const chunk = await this.ask(`$JS.API.DIRECT.GET.${this.run}_WEIGHTS`, JSON.stringify({ seq }));
      const offset = Number(chunk.headers.get("Horizon-Offset"));
      const isOurs = chunk.headers.get("Horizon-Policy") === version; // a chunk that is gone has no such header
      if (isOurs && offset + chunk.data.length <= bytes.length) bytes.set(chunk.data, offset);
    }
    return bytes;
  }
}
