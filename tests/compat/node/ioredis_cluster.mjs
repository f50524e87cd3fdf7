// ioredis' Cluster doing real work. Usage: node ioredis_cluster.mjs MODULE PORT...; says `move` and reads a line.
import assert from 'node:assert/strict';
import { BLOCK, run } from './checks.mjs';
import { moveSlots } from './moves.mjs';

const [module, ...ports] = process.argv.slice(2);
const { Cluster } = await import(module);
const client = new Cluster(ports.map((port) => ({ host: '127.0.0.1', port: Number(port) })), {
  slotsRefreshTimeout: 10_000,
});
client.on('error', () => {}); // a node that is asked in vain; the client goes on by itself
const keys = Array.from({ length: 100 }, (_, n) => `k${n}`);

const checks = {
  async 'every key is where it belongs'() {
    await Promise.all(keys.map((key) => client.set(key, key)));
    assert.deepEqual(await Promise.all(keys.map((key) => client.get(key))), keys);
    const counts = await Promise.all(client.nodes('master').map((node) => node.dbsize()));
    assert.equal(counts.length, 3);
    assert.ok(Math.min(...counts) > 10);
    assert.equal(counts.reduce((sum, count) => sum + count), keys.length);
  },
  async 'keys with one tag are had at once'() {
    assert.equal(await client.mset({ '{t}a': '1', '{t}b': BLOCK }), 'OK');
    assert.deepEqual(await client.mgetBuffer('{t}a', '{t}b'), [Buffer.from('1'), BLOCK]);
    await assert.rejects(client.mget('a', 'b'), /CROSSSLOT|same slot/);
    assert.deepEqual((await client.multi().set('{t}a', '2').incr('{t}a').exec()).map((each) => each[1]), ['OK', 3]);
  },
  async 'a pipeline of one slot comes back in order'() {
    const pipeline = client.pipeline();
    for (let n = 0; n < 50; n += 1) pipeline.set(`{p}${n}`, String(n)).get(`{p}${n}`);
    const replies = (await pipeline.exec()).map(([error, reply]) => error ?? reply);
    assert.deepEqual(replies, Array.from({ length: 50 }, (_, n) => ['OK', String(n)]).flat());
  },
  async 'slots that move are followed'() {
    await Promise.all(keys.map((key) => client.set(key, 'old')));
    await moveSlots();
    await Promise.all(keys.map((key) => client.set(key, BLOCK.subarray(0, 40_000))));
    for (const key of keys) assert.ok(BLOCK.subarray(0, 40_000).equals(await client.getBuffer(key)));
    await moveSlots();
    await Promise.all(keys.map((key) => client.set(key, key)));
    assert.deepEqual(await Promise.all(keys.map((key) => client.get(key))), keys);
  },
};

await run(checks, () => Promise.all(client.nodes('master').map((node) => node.flushall())));
