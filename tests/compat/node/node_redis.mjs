// node-redis doing real work. Usage: node node_redis.mjs MODULE PORT PROTOCOL
import assert from 'node:assert/strict';
import { BLOCK, run, signal } from './checks.mjs';

const [module, port, protocol] = [process.argv[2], Number(process.argv[3]), Number(process.argv[4])];
const { BasicClientSideCache, RESP_TYPES, WatchError, createClient, createClientPool } = await import(module);
const BYTES = { [RESP_TYPES.BLOB_STRING]: Buffer };
const options = (more) => ({ socket: { port, host: '127.0.0.1' }, RESP: protocol, ...more });

async function connect(more = {}) {
  const one = createClient(options(more));
  one.on('error', () => {}); // a lost connection; the client comes back by itself
  await one.connect();
  return one;
}

const client = await connect({ name: 'compat' });

const checks = {
  async 'values come back as they went'() {
    const bytes = client.withTypeMapping(BYTES);
    assert.equal(await client.set('block', BLOCK), 'OK');
    assert.ok(BLOCK.equals(await bytes.get('block')));
    assert.equal(await client.get('nope'), null);
    assert.equal(await client.mSet({ a: '1', b: 'é' }), 'OK');
    assert.deepEqual(await client.mGet(['a', 'nope', 'b']), ['1', null, 'é']);
    assert.ok(BLOCK.subarray(256, 512).equals(await bytes.getRange('block', 256, 511)));
    assert.equal(await client.strLen('block'), BLOCK.length);
    assert.equal(await client.exists(['a', 'b', 'nope']), 2);
    assert.equal(await client.del(['a', 'nope']), 1);
  },
  async 'a key is set with conditions and a life'() {
    assert.equal(await client.set('k', 'v', { condition: 'NX', expiration: { type: 'PX', value: 50_000 } }), 'OK');
    assert.equal(await client.set('k', 'w', { condition: 'NX' }), null);
    assert.equal(await client.set('k', 'w', { condition: 'XX', GET: true, expiration: 'KEEPTTL' }), 'v');
    assert.ok(await client.pTTL('k') > 40_000);
    assert.equal(await client.persist('k'), 1);
    assert.equal(await client.ttl('k'), -1);
    assert.equal(await client.getEx('k', { type: 'EX', value: 100 }), 'w');
    assert.equal(await client.expire('k', 50, 'GT'), 0);
    assert.equal(await client.getDel('k'), 'w');
    assert.equal(await client.ttl('k'), -2);
  },
  async 'counters count and strings grow'() {
    assert.equal(await client.incr('n'), 1);
    assert.equal(await client.incrBy('n', 41), 42);
    assert.equal(await client.decrBy('n', 2), 40);
    assert.equal(Number(await client.incrByFloat('n', 0.5)), 40.5);
    assert.equal(await client.append('s', 'hello'), 5);
    assert.equal(await client.setRange('s', 1, 'a'), 5);
    assert.equal(await client.get('s'), 'hallo');
  },
  async 'keys are renamed, copied, moved, dumped and restored'() {
    await client.set('a', BLOCK);
    assert.equal(await client.rename('a', 'b'), 'OK');
    assert.equal(Number(await client.copy('b', 'c')), 1);
    const image = await client.withTypeMapping(BYTES).dump('c');
    assert.equal(await client.restore('d', 0, image), 'OK');
    assert.ok(BLOCK.equals(await client.withTypeMapping(BYTES).get('d')));
    assert.equal(Number(await client.move('d', 9)), 1);
    assert.deepEqual((await client.keys('*')).sort(), ['b', 'c']);
  },
  async 'the scan iterator finds every key'() {
    await Promise.all(Array.from({ length: 500 }, (_, n) => client.set(`k${n}`, 'x')));
    const found = new Set();
    for await (const keys of client.scanIterator({ MATCH: 'k*', COUNT: 20 })) for (const key of keys) found.add(key);
    assert.equal(found.size, 500);
    assert.equal(await client.dbSize(), 500);
  },
  async 'a thousand commands in flight are answered in order'() {
    const replies = await Promise.all(Array.from({ length: 1000 }, (_, n) => client.echo(`${n}`)));
    assert.deepEqual(replies, Array.from({ length: 1000 }, (_, n) => `${n}`));
  },
  async 'MULTI runs all, tells of errors and gives way to WATCH'() {
    assert.deepEqual(await client.multi().set('a', '1').incr('a').get('a').exec(), ['OK', 2, '2']);
    await assert.rejects(client.multi().set('a', 'x').incr('a').get('a').exec(), (failed) => {
      assert.deepEqual([failed.replies[0], failed.errorIndexes, failed.replies[2]], ['OK', [1], 'x']);
      return /not an integer/.test(failed.replies[1].message);
    });
    const other = await connect();
    await client.watch('a');
    await other.set('a', 'changed');
    await assert.rejects(client.multi().set('a', 'mine').exec(), WatchError);
    assert.equal(await client.get('a'), 'changed');
    await client.watch('a');
    assert.equal(await client.unwatch(), 'OK');
    other.destroy();
  },
  async 'messages reach channel, pattern and shard subscribers'() {
    const subscriber = await connect();
    const [plain, matched, shard] = [signal(), signal(), signal()];
    await subscriber.subscribe('news', (message, channel) => plain.resolve([message, channel]));
    await subscriber.pSubscribe('n*', (message, channel) => matched.resolve([message, channel]));
    await subscriber.sSubscribe('shard', (message, channel) => shard.resolve([message, channel]));
    assert.equal(await client.publish('news', 'hello'), 2);
    assert.equal(await client.sPublish('shard', 'there'), 1);
    assert.deepEqual(await plain.promise, ['hello', 'news']);
    assert.deepEqual(await matched.promise, ['hello', 'news']);
    assert.deepEqual(await shard.promise, ['there', 'shard']);
    assert.deepEqual(await client.pubSubChannels('n*'), ['news']);
    assert.equal(await client.pubSubNumPat(), 1);
    await subscriber.unsubscribe('news');
    await subscriber.pUnsubscribe();
    assert.equal(await client.publish('news', 'nobody'), 0);
    subscriber.destroy();
  },
  async 'binary messages arrive as buffers'() {
    const subscriber = await connect();
    const arrived = signal();
    await subscriber.subscribe('bytes', (message) => arrived.resolve(message), true);
    await client.publish('bytes', BLOCK.subarray(0, 1000));
    assert.ok(BLOCK.subarray(0, 1000).equals(await arrived.promise));
    subscriber.destroy();
  },
  async 'keyspace events are told'() {
    await client.configSet('notify-keyspace-events', 'KEA');
    const subscriber = await connect();
    const [events, last] = [[], signal()];
    await subscriber.pSubscribe('__keyevent@0__:*', (key, channel) => {
      events.push(`${channel.split(':')[1]} ${key}`);
      if (events.at(-1).startsWith('del')) last.resolve();
    });
    await client.set('k', 'v', { expiration: { type: 'EX', value: 100 } });
    await client.del('k');
    await last.promise;
    assert.deepEqual(events, ['set k', 'expire k', 'del k']);
    await client.configSet('notify-keyspace-events', '');
    subscriber.destroy();
  },
  async 'a pool serves many callers at once'() {
    const pool = createClientPool(options(), { minimum: 2, maximum: 8 });
    pool.on('error', () => {});
    await pool.connect();
    await Promise.all(Array.from({ length: 100 }, (_, n) => pool.set(`p${n}`, `${n}`)));
    const found = await Promise.all(Array.from({ length: 100 }, (_, n) => pool.get(`p${n}`)));
    assert.deepEqual(found, Array.from({ length: 100 }, (_, n) => `${n}`));
    await pool.close();
  },
  async 'facts about the server and the client parse'() {
    assert.match(await client.info('server'), /redis_version:\d+\.\d+\.\d+/);
    assert.equal((await client.configGet('databases')).databases, '16');
    assert.equal(await client.clientGetName(), 'compat');
    const mine = await client.clientInfo();
    assert.equal(mine.id, await client.clientId());
    assert.equal(mine.name, 'compat');
    assert.ok((await client.clientList()).some((each) => each.id === mine.id));
    assert.equal((await client.commandInfo(['get']))[0].arity, 2);
    assert.equal(await client.aclWhoAmI(), 'default');
    assert.equal((await client.aclGetUser('default')).flags.includes('nopass'), true);
    await client.set('k', 'v');
    assert.ok(await client.memoryUsage('k') > 0);
    assert.equal(typeof (await client.memoryStats())['total.allocated'], 'number');
    assert.equal(await client.objectEncoding('k'), 'embstr');
    assert.equal((await client.time()).length ?? 1, 2);
    assert.equal((await client.role()).role, 'master');
    assert.ok(Array.isArray(await client.moduleList()));
    assert.ok(Array.isArray(await client.latencyLatest()));
  },
  async 'errors are errors and the connection goes on'() {
    await assert.rejects(client.lPush('l', 'x'), /unknown command 'LPUSH', with args beginning with: 'l' 'x' /);
    await assert.rejects(client.hSet('h', 'f', 'v'), /unknown command 'HSET'/);
    await assert.rejects(client.eval('return 1'), /unknown command 'EVAL'/);
    await client.set('s', 'x');
    await assert.rejects(client.incr('s'), /value is not an integer or out of range/);
    await assert.rejects(client.sendCommand(['CLIENT', 'NOPE']), /unknown subcommand 'NOPE'/);
    assert.equal(await client.ping(), 'PONG');
  },
  async 'databases are apart'() {
    const other = await connect({ database: 3 });
    await other.set('k', 'three');
    assert.equal(await client.get('k'), null);
    await other.select(0);
    assert.equal(await other.get('k'), null);
    await client.swapDb(0, 3);
    assert.equal(await client.get('k'), 'three');
    other.destroy();
  },
  async 'a killed connection comes back with its name, database and subscriptions'() {
    const one = await connect({ name: 'phoenix', database: 2 });
    const subscriber = await connect({ name: 'listener' });
    const heard = signal();
    await subscriber.subscribe('again', (message) => heard.resolve(message));
    const back = [signal(), signal()];
    one.once('ready', back[0].resolve);
    subscriber.once('ready', back[1].resolve);
    for (const each of await client.clientList()) {
      if (['phoenix', 'listener'].includes(each.name)) await client.clientKill({ filter: 'ID', id: each.id });
    }
    await Promise.all(back.map((each) => each.promise));
    await one.set('k', 'v');
    assert.match((await one.clientInfo()).name, /phoenix/);
    assert.equal((await one.clientInfo()).db, 2);
    while (await client.publish('again', 'hello') === 0);
    assert.equal(await heard.promise, 'hello');
    one.destroy();
    subscriber.destroy();
  },
  async 'a monitor sees what others do'() {
    const watcher = await connect();
    const seen = signal();
    await watcher.monitor((line) => { if (String(line).includes('"seen"')) seen.resolve(String(line)); });
    await client.set('seen', 'a"b');
    assert.match(await seen.promise, /^\d+\.\d{6} \[0 127\.0\.0\.1:\d+\] "SET" "seen" "a\\"b"$/);
    watcher.destroy();
  },
};

if (protocol === 3) {
  checks['the client-side cache is told of every change'] = async () => {
    const cache = new BasicClientSideCache({ maxEntries: 100 });
    const cached = await connect({ clientSideCache: cache });
    await client.set('k', 'old');
    assert.equal(await cached.get('k'), 'old');
    assert.equal(await cached.get('k'), 'old');
    assert.equal(cache.stats().hitCount, 1);
    await client.set('k', 'new');
    await cached.ping(); // pushes come before the replies that follow them
    assert.equal(await cached.get('k'), 'new');
    await client.flushAll();
    await cached.ping();
    assert.equal(await cached.get('k'), null);
    cached.destroy();
  };
}

await run(checks, () => client.flushAll());
