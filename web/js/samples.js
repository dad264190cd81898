// Stores the last hour of readings in memory and in IndexedDB, so that it survives a reload.
import * as database from "./database.js";

export const HOUR = 3600; // seconds
const CLEANUP = 300; // samples between removals of old ones

export class Samples {
  times = []; // seconds since 1970, ascending
  #columns;
  #added = 0;

  /// Each reading has `width` numbers.
  constructor(width) {
    this.#columns = Array.from({ length: width }, () => []);
  }

  /// Reads the samples that earlier pages stored.
  async load() {
    try {
      const since = Date.now() / 1000 - HOUR;
      for (const { time, values } of await database.getAll("samples", IDBKeyRange.lowerBound(since))) {
        if (values.length === this.#columns.length) this.#insert(time, values);
      }
    } catch { /* Without IndexedDB the history begins with this page. */ }
  }

  /// Adds a reading. Missing numbers are null.
  add(time, values) {
    this.#insert(time, values);
    let old = 0;
    while (this.times[old] < time - HOUR) ++old;
    if (old) for (const column of [this.times, ...this.#columns]) column.splice(0, old);
    database.put("samples", { time, values }).catch(() => {});
    if (++this.#added % CLEANUP === 1) database.remove("samples", IDBKeyRange.upperBound(time - HOUR)).catch(() => {});
  }

  column(i) { return this.#columns[i]; }

  #insert(time, values) {
    if (time <= this.times.at(-1)) return; // another tab read at the same time
    this.times.push(time);
    values.forEach((value, i) => this.#columns[i].push(value));
  }
}
