// Asks the process that started this script to move the slots of the cluster, and waits until they have moved.
import { createInterface } from 'node:readline';

const answers = createInterface({ input: process.stdin })[Symbol.asyncIterator]();

export async function moveSlots() {
  process.stdout.write('move\n');
  await answers.next();
}
