// Runs named checks one after the other against an empty server and says on stdout how each went: one line of JSON.
// A check that hangs is a failure, not a hung test run.
const CHECK_MS = 20_000;

export const BLOCK = Buffer.from(Array.from({ length: 1 << 20 }, (_, at) => (at * 7 + (at >> 8)) & 255));

/** A promise with its resolve function: what a callback is waited for with. */
export function signal() {
  let resolve;
  const promise = new Promise((settle) => { resolve = settle; });
  return { promise, resolve };
}

/** Run every check; `empty` makes the server empty before each. */
export async function run(checks, empty) {
  const outcome = {};
  for (const [name, check] of Object.entries(checks)) {
    let timer;
    const late = new Promise((_, reject) => {
      timer = setTimeout(() => reject(new Error(`nothing for ${CHECK_MS} ms`)), CHECK_MS);
    });
    try {
      await empty();
      await Promise.race([check(), late]);
      outcome[name] = 'ok';
    } catch (error) {
      const lines = String(error?.stack ?? error).split('\n'); // without the frames of the client and of Node.js
      outcome[name] = lines.filter((line) => !/node_modules|node:/.test(line)).join('\n');
    }
    clearTimeout(timer);
  }
  console.log(JSON.stringify(outcome));
  process.exit(0);
}
