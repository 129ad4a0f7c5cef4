// A client in another language, with the .proto files alone: node client.js TARGET JOB PROTO_FOLDER...
// Prints what it saw as one JSON document. JOB is the name of a function of `jobs`.
"use strict";

const grpc = require("@grpc/grpc-js");
const loader = require("@grpc/proto-loader");

const [target, job, ...includeDirs] = process.argv.slice(2);
const options = { keepCase: true, longs: Number, enums: String, oneofs: true, defaults: true, includeDirs };
const protos = grpc.loadPackageDefinition(
  loader.loadSync(
    [
      "pageturner/v1/generation.proto",
      "pageturner/v1/model.proto",
      "pageturner/v1/admin.proto",
      "google/rpc/status.proto",
      "google/rpc/error_details.proto",
    ],
    options,
  ),
);
const details = loader.loadSync(["google/rpc/status.proto", "google/rpc/error_details.proto"], options);

const { GenerationService, ModelService, AdminService } = protos.pageturner.v1;
const credentials = grpc.credentials.createInsecure();
const generation = new GenerationService(target, credentials);
const models = new ModelService(target, credentials);
const admin = new AdminService(target, credentials);

const PROMPT = { token_ids: { ids: [1, 2, 3] } };

/** A unary call as a promise. */
function call(client, method, request, callOptions = {}) {
  return new Promise((resolve, reject) => {
    client[method](request, callOptions, (error, answer) => (error ? reject(error) : resolve(answer)));
  });
}

/** All messages of a stream, and how it ended; `leave` may look at them so far and cancel it. */
function read(request, { leave = () => false, ...callOptions } = {}) {
  return new Promise((resolve) => {
    const messages = [];
    const stream = generation.GenerateStream(request, callOptions);
    stream.on("data", (message) => {
      messages.push(message);
      if (leave(messages)) stream.cancel();
    });
    stream.on("error", (error) => resolve({ messages, error: describe(error) }));
    stream.on("end", () => resolve({ messages, error: null }));
  });
}

/** An error's code by name, its text, and its google.rpc details by their type. */
function describe(error) {
  const found = {};
  for (const packed of error.metadata?.get("grpc-status-details-bin") ?? []) {
    const status = details["google.rpc.Status"].deserialize(packed);
    for (const detail of status.details) {
      const name = detail.type_url.split("/").pop();
      found[name] = details[name].deserialize(detail.value);
    }
  }
  return { code: grpc.status[error.code], text: error.details, details: found };
}

const jobs = {
  /** The whole of what an ordinary client does. */
  async ask() {
    const sampling = { max_tokens: 6, seed: 7, n: 2 };
    const whole = await call(generation, "Generate", { prompt: PROMPT, sampling });
    const { messages, error } = await read({ prompt: PROMPT, sampling, request_id: "js" });
    const { models: served } = await call(models, "ListModels", {});
    const { load } = await call(admin, "GetLoad", {});
    return { whole, messages, error, models: served, load };
  },

  /** Leaves a stream after its third message. */
  async cancel() {
    const sampling = { max_tokens: 40 };
    return read({ prompt: PROMPT, sampling }, { leave: (messages) => messages.length === 3 });
  },

  /** Two bad fields of two kinds, an unknown model, a deadline that has passed. */
  async errors() {
    const refused = (request, callOptions) =>
      call(generation, "Generate", request, callOptions).then(() => null, describe);
    return {
      sampling: await refused({ prompt: PROMPT, sampling: { top_p: 1.5 } }),
      prompt: await refused({ prompt: { token_ids: { ids: [1, 999999] } } }),
      model: await refused({ prompt: PROMPT, model: "another" }),
      deadline: await refused({ prompt: PROMPT, sampling: { max_tokens: 40 } }, { deadline: Date.now() - 1 }),
      large: await refused({ prompt: { text: "x".repeat(4 << 20) } }),
    };
  },

  /** More at once than may wait. */
  async flood() {
    const ask = () => read({ prompt: PROMPT, sampling: { max_tokens: 8 } });
    return Promise.all(Array.from({ length: 40 }, ask));
  },
};

jobs[job]().then(
  (seen) => {
    console.log(JSON.stringify(seen));
    for (const client of [generation, models, admin]) client.close();
  },
  (error) => {
    console.error(error);
    process.exitCode = 1;
  },
);
