// The actor: lease a ticket, play its group, publish the group, and only then acknowledge the ticket.
import { setMaxListeners } from "node:events";
import { setTimeout as sleep } from "node:timers/promises";
import { compareVersions, digestOf, digestOfFile, float32, int32, pack, ticketId, unpack } from "./records.js";
import * as parity from "./parity.js";

const WEIGHTS_WAIT_MS = 60_000;
const RETRY_MS = 2_000;
const BROKEN = ["env_error", "env_timeout", "policy_error", "unfit"];

export class Actor {
  /** `turnMs` is how long a reply takes: a real policy's time. */
  constructor(broker, { name, turnMs = 0, identity = {} }) {
    Object.assign(this, { broker, name, turnMs });
    this.provenance = { actor: name, engine: "actor-js uniform", environment: parity.VERSION, ...identity };
    this.version = { version: 0, lineage: 0 }; // the model that the run begins with is announced nowhere
  }

  /** Serves tickets until the run is over or `draining` is set; a ticket in hand at `cut` is given back. */
  async serve(draining, cut) {
    this.leaseMs = await this.broker.leaseMs();
    while (!(await this.broker.state("run"))) await sleep(RETRY_MS); // the controller has yet to start
    while (!draining.aborted && !(await this.isOver())) {
      const message = await this.broker.pull();
      if (!message) continue;
      if (draining.aborted) await this.broker.giveBack(message);
      else await this.settle(message, cut);
    }
  }

  /** A run that was finished and then given more steps is not over: its learner is on its way. */
  async isOver() {
    const [manifest, run] = [await this.broker.state("policy", "weights"), await this.broker.state("run")];
    return Boolean(run && (manifest?.finished_step ?? -1) >= run.total_steps);
  }

  /** Ends a lease in one of three ways: its group is published, it is void, or it is given back. */
  async settle(message, cut) {
    let ticket;
    try {
      ticket = unpack(message.data, "ticket");
    } catch (error) {
      console.error(`a message that is no ticket is kept in DEAD: ${error.message}`);
      await this.broker.storeDeadLetter(message, error.message);
      return this.broker.acknowledge(message);
    }
    const run = await this.broker.state("run");
    const deliveries = this.broker.deliveries(message);
    console.log(`${ticketId(ticket)} is leased, delivery ${deliveries}`);
    if (deliveries > run.max_deliver) return this.void(message, ticket, `delivered ${deliveries - 1} times in vain`);
    const stop = new AbortController();
    setMaxListeners(0, stop.signal); // every episode listens
    const end = this.extend(message, () => stop.abort(new Error("the lease was lost")));
    const drain = () => stop.abort(new Error("draining"));
    cut.addEventListener("abort", drain);
    if (cut.aborted) drain();
    try {
      const group = await this.play(ticket, deliveries, run, stop.signal);
      const valid = group.episodes.filter((episode) => !BROKEN.includes(episode.stop));
      const unfit = group.episodes.find((episode) => episode.stop === "unfit");
      if (valid.length >= Math.min(2, ticket.group_size)) return await this.publish(message, ticket, group);
      if (unfit) return await this.void(message, ticket, unfit.error);
      console.error(`${ticketId(ticket)} is given back: ${group.episodes[0].error}`);
      await this.broker.giveBack(message, RETRY_MS);
    } catch (error) {
      if (!stop.signal.aborted) throw error;
      console.error(`${ticketId(ticket)} is not finished: ${stop.signal.reason.message}`);
      if (cut.aborted) await this.broker.giveBack(message);
    } finally {
      cut.removeEventListener("abort", drain);
      end();
    }
  }

  /** Extends the lease until the returned function is called; `onLost` once that was not confirmed for its length. */
  extend(message, onLost) {
    let confirmed = Date.now();
    const timer = setInterval(async () => {
      const asked = Date.now();
      if (asked - confirmed >= this.leaseMs) onLost();
      await this.broker.extend(message).then(() => (confirmed = asked)).catch(onLost);
    }, this.leaseMs / 3);
    return () => clearInterval(timer);
  }

  async publish(message, ticket, group) {
    const { duplicate } = await this.broker.end(ticket, `groups.${ticket.kind}`, pack("group", group));
    await this.broker.acknowledge(message);
    console.log(`${ticketId(ticket)} ${duplicate ? "had ended before" : "is published"}`);
  }

  async void(message, ticket, reason) {
    await this.broker.end(ticket, "groups.void", pack("void", { ticket, reason, actor: this.name }));
    await this.broker.acknowledge(message);
    console.error(`${ticketId(ticket)} is void: ${reason}`);
  }

  /** Waits for weights as new as the ticket asks for, or as the newest announced: a version may be skipped. */
  async follow(issued, signal) {
    for (const begun = Date.now(); ; await sleep(RETRY_MS / 4, undefined, { signal })) {
      const manifest = await this.broker.state("policy", "weights");
      // This actor applies no changes: it waits for key frames, and samples with the newest one.
      const newest = manifest && (manifest.path ? manifest.policy : (manifest.key_policy ?? manifest.policy));
      if (newest && compareVersions(newest, this.version) > 0) await this.load(manifest, newest);
      const wanted = newest && compareVersions(newest, issued) < 0 ? newest : issued;
      if (compareVersions(this.version, wanted) >= 0 || Date.now() - begun > WEIGHTS_WAIT_MS) return;
    }
  }

  async load(manifest, policy) {
    const { path, digest, key_digest, chunks } = manifest;
    const shared = path && (await digestOfFile(path).catch(() => undefined)) === digest;
    if (!shared) {
      const bytes = chunks ? await this.broker.frame({ ...manifest, policy }) : undefined;
      const announced = key_digest ?? digest;
      if (!bytes || (await digestOf([bytes])) !== announced) return console.error("the announced weights cannot be had");
    }
    this.version = policy; // a real policy loads the safetensors here
    console.log(`weights v${policy.version}.l${policy.lineage} from ${shared ? "the file" : "the stream"}`);
  }

  async play(ticket, deliveries, run, signal) {
    const started_at_ms = Date.now();
    if (ticket.kind !== "demo") await this.follow(ticket.issued_at_version, signal);
    const places = [...Array(ticket.group_size).keys()];
    const episodes = await Promise.all(places.map((index) => this.episode(ticket, index, run, signal)));
    return { ticket, episodes, provenance: this.provenance, deliveries, started_at_ms, finished_at_ms: Date.now() };
  }

  async episode(ticket, index, run, signal) {
    const { env_id, task_id } = ticket.task;
    const { max_turn_tokens, seed } = ticket.sampling;
    const broken = (stop, error) => ({ index, prompt_ids: int32([]), turns: [], stop, error });
    if (env_id !== "parity") return broken("env_error", `this actor plays parity, not ${env_id}`);
    const read = (text, taken) =>
      ticket.announce_horizon ? `${text}\n[${ticket.horizon_turns - taken} turns left]` : text;
    const world = parity.reset(task_id);
    const prompt = read(world.observation, 0);
    const promptIds = parity.render([run.system_prompt, prompt].filter(Boolean).join("\n"));
    const turns = [];
    let [length, success, stop] = [promptIds.length, false, undefined];
    while (!stop) {
      if (length + max_turn_tokens > run.max_context_tokens) {
        const isUnfit = !turns.length || ticket.kind === "demo";
        if (isUnfit) return broken("unfit", `${length} tokens leave no room for another turn`);
        stop = "context";
        break;
      }
      await sleep(this.turnMs, undefined, { signal });
      const random = parity.dice(seed == null ? seed : (seed + index) * 4096 + turns.length);
      const reply = ticket.kind === "demo" ? parity.demonstrate() : parity.sample(max_turn_tokens, random);
      const by = ticket.kind === "demo" ? ticket.issued_at_version : this.version;
      const step = world.step(reply.text);
      success = step.success;
      if (step.terminated) stop = "terminated";
      else if (turns.length + 1 >= ticket.horizon_turns) stop = "horizon";
      const observation = stop ? step.observation : read(step.observation, turns.length + 1);
      const observationIds = stop ? [] : parity.render(observation);
      length += reply.outputIds.length + observationIds.length;
      turns.push({
        output_ids: int32(reply.outputIds),
        logprobs: float32(reply.logprobs),
        spans: [{ version: by.version, lineage: by.lineage, tokens: reply.outputIds.length }],
        observation_ids: int32(observationIds),
        reward: step.reward,
        text: reply.text,
        observation,
      });
    }
    if (turns.length) turns.at(-1).observation_ids = int32([]); // nothing was sampled after it
    return { index, prompt_ids: int32(promptIds), turns, stop, success, prompt };
  }
}
