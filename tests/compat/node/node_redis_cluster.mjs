// node-redis' cluster client doing real work. Usage: node node_redis_cluster.mjs MODULE PORT...; says `move` and reads
// a line.
import assert from 'node:assert/strict';
import { BLOCK, run } from './checks.mjs';
import { moveSlots } from './moves.mjs';

const [module, ...ports] = process.argv.slice(2);
const { createCluster } = await import(module);
const client = createCluster({ rootNodes: ports.map((port) => ({ url: `redis://127.0.0.1:${port}` })) });
client.on('error', () => {}); // a node that is asked in vain; the client goes on by itself
await client.connect();
const keys = Array.from({ length: 100 }, (_, n) => `k${n}`);

const checks = {
  async 'every key is where it belongs'() {
    await Promise.all(keys.map((key) => client.set(key, key)));
    assert.deepEqual(await Promise.all(keys.map((key) => client.get(key))), keys);
    assert.equal(client.masters.length, 3);
  },
  async 'keys with one tag are had at once'() {
    assert.equal(await client.mSet({ '{t}a': '1', '{t}b': '2' }), 'OK');
    assert.deepEqual(await client.mGet(['{t}a', '{t}b']), ['1', '2']);
  },
  async 'a transaction of one slot is run'() {
    assert.deepEqual(await client.multi().set('{t}a', '2').incr('{t}a').exec(), ['OK', 3]);
  },
  async 'slots that move are followed'() {
    await Promise.all(keys.map((key) => client.set(key, 'old')));
    await moveSlots();
    const text = BLOCK.toString('latin1', 0, 40_000);
    for (const key of keys) assert.equal(await client.set(key, text), 'OK');
    for (const key of keys) assert.equal(await client.get(key), text);
    await moveSlots();
    for (const key of keys) assert.equal(await client.set(key, key), 'OK');
    assert.deepEqual(await Promise.all(keys.map((key) => client.get(key))), keys);
  },
};

async function empty() {
  for (const master of client.masters) await (await client.nodeClient(master)).flushAll();
}

await run(checks, empty);
