// ioredis doing real work. Usage: node ioredis.mjs MODULE PORT PROTOCOL
import assert from 'node:assert/strict';
import { BLOCK, run, signal } from './checks.mjs';

const [module, port, protocol] = [process.argv[2], Number(process.argv[3]), Number(process.argv[4])];
const { Redis } = await import(module);
const clients = [];

function open(more = {}) {
  const one = new Redis({ port, host: '127.0.0.1', protocol, retryStrategy: () => 5, ...more });
  one.on('error', () => {}); // a lost connection; the client comes back by itself
  clients.push(one);
  return one;
}

const client = open({ connectionName: 'compat' });

const checks = {
  async 'values come back as they went'() {
    assert.equal(await client.set('block', BLOCK), 'OK');
    assert.ok(BLOCK.equals(await client.getBuffer('block')));
    assert.equal(await client.get('nope'), null);
    assert.equal(await client.mset({ a: '1', b: 'é' }), 'OK');
    assert.deepEqual(await client.mget('a', 'nope', 'b'), ['1', null, 'é']);
    assert.ok(BLOCK.subarray(256, 512).equals(await client.getrangeBuffer('block', 256, 511)));
    assert.equal(await client.strlen('block'), BLOCK.length);
    assert.equal(await client.exists('a', 'b', 'nope'), 2);
    assert.equal(await client.unlink('a', 'nope'), 1);
  },
  async 'a key is set with conditions and a life'() {
    assert.equal(await client.set('k', 'v', 'PX', 50_000, 'NX'), 'OK');
    assert.equal(await client.set('k', 'w', 'NX'), null);
    assert.equal(await client.set('k', 'w', 'KEEPTTL', 'XX', 'GET'), 'v');
    assert.ok(await client.pttl('k') > 40_000);
    assert.equal(await client.persist('k'), 1);
    assert.equal(await client.setex('k', 100, 'x'), 'OK');
    assert.equal(await client.getex('k', 'PERSIST'), 'x');
    assert.equal(await client.ttl('k'), -1);
    assert.equal(await client.getdel('k'), 'x');
    assert.equal(await client.pexpire('k', 100), 0);
  },
  async 'counters count and strings grow'() {
    assert.equal(await client.incr('n'), 1);
    assert.equal(await client.incrby('n', 41), 42);
    assert.equal(Number(await client.incrbyfloat('n', 0.5)), 42.5);
    assert.equal(await client.append('s', 'hello'), 5);
    assert.equal(await client.setrange('s', 1, 'a'), 5);
    assert.equal(await client.getset('s', 'new'), 'hallo');
  },
  async 'keys are renamed, copied, dumped and restored'() {
    await client.set('a', BLOCK);
    assert.equal(await client.rename('a', 'b'), 'OK');
    assert.equal(await client.copy('b', 'c'), 1);
    assert.equal(await client.restore('d', 0, await client.dumpBuffer('c')), 'OK');
    assert.ok(BLOCK.equals(await client.getBuffer('d')));
    assert.equal(await client.renamenx('c', 'd'), 0);
    assert.deepEqual((await client.keys('*')).sort(), ['b', 'c', 'd']);
  },
  async 'the scan stream finds every key'() {
    await Promise.all(Array.from({ length: 500 }, (_, n) => client.set(`k${n}`, 'x')));
    const found = new Set();
    for await (const keys of client.scanStream({ match: 'k*', count: 20 })) for (const key of keys) found.add(key);
    assert.equal(found.size, 500);
    assert.equal(await client.dbsize(), 500);
  },
  async 'a pipeline keeps its order and its errors'() {
    const pipeline = client.pipeline();
    for (let n = 0; n < 300; n++) pipeline.set(`k${n}`, BLOCK.subarray(0, n * 100));
    pipeline.call('NOPE', 'x');
    for (let n = 0; n < 300; n++) pipeline.getBuffer(`k${n}`);
    const replies = await pipeline.exec();
    assert.equal(replies.length, 601);
    assert.match(replies[300][0].message, /unknown command 'NOPE', with args beginning with: 'x' /);
    replies.slice(301).forEach(([error, value], n) => {
      assert.equal(error, null);
      assert.ok(BLOCK.subarray(0, n * 100).equals(value));
    });
  },
  async 'automatic pipelining answers each caller'() {
    const eager = open({ enableAutoPipelining: true });
    await Promise.all(Array.from({ length: 200 }, (_, n) => eager.set(`k${n}`, `${n}`)));
    const found = await Promise.all(Array.from({ length: 200 }, (_, n) => eager.get(`k${n}`)));
    assert.deepEqual(found, Array.from({ length: 200 }, (_, n) => `${n}`));
    eager.disconnect();
  },
  async 'MULTI runs all, tells of errors and gives way to WATCH'() {
    const replies = await client.multi().set('a', 'x').incr('a').get('a').exec();
    assert.deepEqual([replies[0], replies[2]], [[null, 'OK'], [null, 'x']]);
    assert.match(replies[1][0].message, /not an integer/);
    await assert.rejects(client.multi().set('a').exec(), /EXECABORT/);
    const other = open();
    await client.watch('a');
    await other.set('a', 'changed');
    assert.equal(await client.multi().set('a', 'mine').exec(), null);
    assert.equal(await client.get('a'), 'changed');
    await client.multi({ pipeline: false });
    assert.equal(await client.set('a', 'queued'), 'QUEUED');
    assert.equal(await client.discard(), 'OK');
    assert.equal(await client.get('a'), 'changed');
    other.disconnect();
  },
  async 'messages reach channel and pattern subscribers'() {
    const subscriber = open();
    const [plain, matched] = [signal(), signal()];
    subscriber.on('messageBuffer', (channel, message) => plain.resolve([String(channel), message]));
    subscriber.on('pmessage', (pattern, channel, message) => matched.resolve([pattern, channel, message.length > 0]));
    assert.equal(await subscriber.subscribe('news', 'other'), 2);
    assert.equal(await subscriber.psubscribe('n*'), 3);
    assert.equal(await client.publish('news', BLOCK.subarray(0, 1000)), 2);
    const [channel, message] = await plain.promise;
    assert.equal(channel, 'news');
    assert.ok(BLOCK.subarray(0, 1000).equals(message));
    assert.deepEqual(await matched.promise, ['n*', 'news', true]);
    assert.deepEqual(await client.pubsub('NUMSUB', 'news', 'nope'), ['news', 1, 'nope', 0]);
    assert.equal(await subscriber.unsubscribe('news', 'other'), 1);
    assert.equal(await subscriber.punsubscribe('n*'), 0);
    assert.equal(await subscriber.ping(), 'PONG');
    subscriber.disconnect();
  },
  async 'expired keys are told of'() {
    await client.config('SET', 'notify-keyspace-events', 'Ex');
    const subscriber = open();
    const heard = signal();
    subscriber.on('message', (channel, key) => heard.resolve([channel, key]));
    await subscriber.subscribe('__keyevent@0__:expired');
    await client.psetex('k', 20, 'v');
    assert.deepEqual(await heard.promise, ['__keyevent@0__:expired', 'k']);
    await client.config('SET', 'notify-keyspace-events', '');
    subscriber.disconnect();
  },
  async 'facts about the server and the client parse'() {
    assert.match(await client.info(), /loading:0/);
    assert.equal(await client.client('GETNAME'), 'compat');
    assert.match(await client.client('LIST'), /name=compat /);
    assert.equal((await client.command('INFO', 'get'))[0][1], 2);
    assert.deepEqual(await client.command('GETKEYS', 'MSET', 'a', '1', 'b', '2'), ['a', 'b']);
    assert.equal((await client.time()).length, 2);
    assert.equal((await client.role())[0], 'master');
    assert.equal(await client.acl('WHOAMI'), 'default');
    assert.equal(typeof await client.slowlog('LEN'), 'number');
    await client.set('k', 'v');
    assert.ok(await client.memory('USAGE', 'k') > 0);
    assert.equal(await client.object('ENCODING', 'k'), 'embstr');
  },
  async 'errors are errors and the connection goes on'() {
    await assert.rejects(client.lpush('l', 'x'), /ERR unknown command 'lpush', with args beginning with: 'l' 'x' /i);
    await assert.rejects(client.xadd('s', '*', 'f', 'v'), /ERR unknown command 'xadd'/i);
    client.defineCommand('twice', { numberOfKeys: 1, lua: 'return 1' });
    await assert.rejects(client.twice('k'), /ERR unknown command 'eval/i);
    await assert.rejects(client.expire('k', 'x'), /value is not an integer or out of range/);
    assert.equal(await client.ping(), 'PONG');
  },
  async 'databases are apart'() {
    const other = open({ db: 3 });
    await other.set('k', 'three');
    assert.equal(await client.get('k'), null);
    assert.equal(await other.select(0), 'OK');
    assert.equal(await other.get('k'), null);
    other.disconnect();
  },
  async 'a killed connection comes back with its name, database and subscriptions'() {
    const one = open({ connectionName: 'phoenix', db: 2 });
    const subscriber = open({ connectionName: 'listener' });
    const heard = signal();
    subscriber.on('message', (_, message) => heard.resolve(message));
    await subscriber.subscribe('again');
    await one.ping();
    for (const line of (await client.client('LIST')).split('\n')) {
      if (/name=(phoenix|listener) /.test(line)) await client.client('KILL', 'ID', /^id=(\d+)/.exec(line)[1]);
    }
    assert.match(await one.client('INFO'), /name=phoenix .* db=2 /);
    while (await client.publish('again', 'hello') === 0);
    assert.equal(await heard.promise, 'hello');
    one.disconnect();
    subscriber.disconnect();
  },
  async 'a monitor sees what others do'() {
    const watcher = await client.monitor();
    const seen = signal();
    watcher.on('monitor', (_, words, __, database) => { if (words[1] === 'seen') seen.resolve([words, database]); });
    await client.set('seen', 'a"b');
    assert.deepEqual(await seen.promise, [['set', 'seen', 'a"b'], '0']);
    watcher.disconnect();
  },
  async 'QUIT ends a connection'() {
    const one = open();
    assert.equal(await one.quit(), 'OK');
  },
};

await run(checks, () => client.flushall());
