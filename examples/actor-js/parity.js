// The environment `parity` and a policy for it, as small as they can be: enough to fill a group honestly.
// A reply with an even number of letters earns a half; four even replies solve the task.

const TURNS = 4;
const END_OF_TURN = 0; // every other id is a byte of text
const ALPHABET = [..."abcdefg"].map((letter) => letter.charCodeAt(0)).concat(END_OF_TURN);

export const VERSION = "parity 1";

/** Begins an episode: the first observation, and what answers a reply. */
export function reset(taskId) {
  let [turns, even] = [0, 0];
  return {
    observation: `This is ${taskId}. Reply with an even number of characters.`,
    step(reply) {
      const isEven = reply.length % 2 === 0;
      turns += 1;
      even += isEven;
      return {
        observation: isEven ? "even, again" : "odd, again",
        reward: isEven ? 0.5 : 0,
        terminated: turns === TURNS,
        success: even === TURNS,
      };
    },
  };
}

export const render = (text) => [...Buffer.from(`${text}\n> `, "utf8")];

/** Samples a reply, each token uniformly: letters, and at some point the end of the turn. */
export function sample(maxTokens, random) {
  const outputIds = [];
  while (outputIds.length < maxTokens && outputIds.at(-1) !== END_OF_TURN) {
    outputIds.push(ALPHABET[Math.floor(random() * ALPHABET.length)]);
  }
  return { outputIds, logprobs: outputIds.map(() => -Math.log(ALPHABET.length)), text: textOf(outputIds) };
}

/** What an expert replies in a demonstration: nothing was sampled, so each logprob is 0. */
export function demonstrate() {
  const outputIds = [...Buffer.from("even"), END_OF_TURN];
  return { outputIds, logprobs: outputIds.map(() => 0), text: textOf(outputIds) };
}

const textOf = (ids) => Buffer.from(ids.filter((id) => id !== END_OF_TURN)).toString("utf8");

/** A generator of numbers from 0 to 1: the same for the same seed, and nobody's without one. */
export function dice(seed) {
  if (seed == null) return Math.random;
  let state = seed % 2 ** 32;
  return () => {
    state = (Math.imul(state, 1664525) + 1013904223) >>> 0;
    return state / 2 ** 32;
  };
}
