// node main.js --url nats://127.0.0.1:4222 --run actor-js
import { readFile } from "node:fs/promises";
import { hostname } from "node:os";
import { setTimeout as sleep } from "node:timers/promises";
import { parseArgs } from "node:util";
import { connect, nkeyAuthenticator, nkeys } from "@nats-io/transport-node";
import { Actor } from "./actor.js";
import { Broker } from "./broker.js";
import { identityOf } from "./records.js";

const { values } = parseArgs({
  options: {
    url: { type: "string", default: "nats://127.0.0.1:4222" },
    run: { type: "string" },
    model: { type: "string" }, // the run's model directory, for the group's provenance
    nkey: { type: "string" }, // a file with the actor's nkey seed, of `horizonrl broker keys`
    ca: { type: "string" }, // the certificate authority of a broker with TLS
    "drain-s": { type: "string", default: "20" },
    "turn-ms": { type: "string", default: "0" },
  },
});
if (!values.run) throw new Error("--run NAME is missing: the run.name of the recipe");

const seed = values.nkey && new TextEncoder().encode((await readFile(values.nkey, "utf8")).trim());
const user = seed ? [nkeys.fromSeed(seed).getPublicKey()] : [];
const connection = await connected({
  servers: values.url.split(","),
  name: `actor-js ${values.run}`,
  inboxPrefix: ["_INBOX", values.run, "actor", ...user].join("."), // a secured broker lets it listen to no other
  maxReconnectAttempts: -1,
  ...(seed && { authenticator: nkeyAuthenticator(seed) }),
  ...(values.ca && { tls: { caFile: values.ca } }),
});

/** Waits for a broker that has yet to start; one that refuses the credentials is an error. */
async function connected(options) {
  for (;;) {
    try {
      return await connect(options);
    } catch (error) {
      if (error.cause?.code !== "ECONNREFUSED") throw error;
      console.error(`${error.cause.message}: the broker is waited for`);
      await sleep(1000);
    }
  }
}

const [draining, cut] = [new AbortController(), new AbortController()];
for (const name of ["SIGTERM", "SIGINT"]) {
  process.once(name, () => {
    draining.abort();
    setTimeout(() => cut.abort(), Number(values["drain-s"]) * 1000).unref();
  });
}

const actor = new Actor(new Broker(connection, values.run), {
  name: `${hostname()}-${process.pid}`.replaceAll(/[^A-Za-z0-9_-]/g, "-").slice(-128),
  turnMs: Number(values["turn-ms"]),
  identity: values.model && (await identityOf(values.model)),
});
await actor.serve(draining.signal, cut.signal);
await connection.close();
console.log(draining.signal.aborted ? "drained" : "the run is finished");
