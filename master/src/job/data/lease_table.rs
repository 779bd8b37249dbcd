//! The lease table: leases of records, queues of records to lease, and the cached ledger.
//!
//! A record of an epoch is in one of four states: absorbed (in the ledger), leased, queued, or
//! unaccounted. Records are unaccounted when their worker is lost: it may have put them into the
//! parameters in its last step, so they are neither leased nor queued until the next group has
//! reported its ledger ([`LeaseTable::rebuild`]).
//!
//! A queue is not a list of shards. It is the epoch's order, a position in it, and the set of
//! records that were absorbed or leased when the queue was last rebuilt; shards are cut out of
//! these on request.
//!
//! **Invariant:** a range that [`LeaseTable::lease`] gave is not given again before a rebuild that
//! found it neither absorbed nor leased.

use std::collections::BTreeMap;
use std::ops::Range;

use elasticdl_proto::{Ledger, RangeSet, RecordRange, ShardCounts, WorkerId};

use super::shards::Shards;
use crate::job::event::LedgerReport;

/// The leases, queues and ledger of a job's records.
#[derive(Debug)]
pub(crate) struct LeaseTable {
    shards: Shards,
    epochs: u32,
    ledger: Ledger,
    /// Queues of epochs that were requested and are not complete.
    queues: BTreeMap<u32, Queue>,
    /// Leases by epoch and first record.
    leases: BTreeMap<(u32, u64), Lease>,
    /// Leases that the last report ended. The reporter alone may have committed its last step; if
    /// it is lost, the group continues without that step and these leases come back.
    unstable_leases: Vec<(RecordRange, WorkerId)>,
    /// The step of the last report.
    step: u64,
    /// The first epoch that was not complete in the report before the last.
    epoch_stable: u32,
    /// Leased records by worker and epoch; no entry is 0.
    leased: BTreeMap<(WorkerId, u32), u64>,
    /// Shards of the epochs that are not complete whose records are all absorbed.
    shards_done: BTreeMap<u32, u32>,
}

#[derive(Debug)]
struct Lease {
    end: u64,
    worker: WorkerId,
}

/// Limits on one lease.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Share {
    /// Records that one rank contributes to a step.
    pub(crate) records: u64,
    /// Workers that the rest of an epoch is to be spread over.
    pub(crate) workers: u64,
}

impl LeaseTable {
    pub(crate) fn new(shards: Shards, epochs: u32) -> Self {
        let ledger = Ledger::new(shards.records());
        let (queues, leases, leased) = Default::default();
        let (unstable_leases, step, epoch_stable, shards_done) = Default::default();
        Self {
            shards,
            epochs,
            ledger,
            queues,
            leases,
            unstable_leases,
            step,
            epoch_stable,
            leased,
            shards_done,
        }
    }

    pub(crate) fn shards(&self) -> &Shards {
        &self.shards
    }

    /// The cached ledger.
    pub(crate) fn ledger(&self) -> &Ledger {
        &self.ledger
    }

    /// All epochs before this one stay complete, whichever worker is lost next.
    pub(crate) fn epoch_stable(&self) -> u32 {
        self.epoch_stable
    }

    /// Records of all epochs.
    pub(crate) fn expected(&self) -> u64 {
        u64::from(self.epochs) * self.shards.records()
    }

    /// Records that `worker` holds.
    pub(crate) fn leased_to(&self, worker: WorkerId) -> u64 {
        self.leased.range((worker, 0)..=(worker, u32::MAX)).map(|(_, &records)| records).sum()
    }

    /// Shards by state of the first incomplete epoch, or of the last epoch when all are complete.
    /// `O(n log n)` in the epoch's leases.
    pub(crate) fn shard_counts(&self) -> ShardCounts {
        let (epoch, shards) = (self.ledger.epoch(), self.shards.len());
        if epoch >= self.epochs {
            return ShardCounts { todo: 0, leased: 0, done: shards };
        }
        let done = self.shards_done.get(&epoch).copied().unwrap_or_default();
        let (mut leased, mut before) = (0, None);
        for &(_, start) in self.leases.range((epoch, 0)..=(epoch, u64::MAX)).map(|(key, _)| key) {
            let shard = self.shards.of(start);
            leased += u32::from(before != Some(shard));
            before = Some(shard);
        }
        ShardCounts { todo: shards - done - leased, leased, done }
    }

    /// Whether records of `epoch` can be leased now: it is the group's epoch or the next one.
    pub(crate) fn is_open(&self, epoch: u32) -> bool {
        let first = self.ledger.epoch();
        epoch < self.epochs && epoch >= first && epoch - first <= EPOCHS_AHEAD
    }

    /// Leases up to `wanted` records of an open `epoch` to `worker`.
    ///
    /// Guided self-scheduling: towards an epoch's end a worker holds at most its part of half of
    /// the remaining records, so that all workers finish together, but always enough for one step.
    /// Each epoch is computed separately: records of the next epoch must not keep a worker from the
    /// last records of this one.
    ///
    /// Each range lies in one shard. `O(log n)` per range, plus the shards that are skipped because
    /// they are absorbed.
    pub(crate) fn lease(
        &mut self,
        worker: WorkerId,
        epoch: u32,
        wanted: u64,
        share: Share,
    ) -> Vec<RecordRange> {
        debug_assert!(self.is_open(epoch));
        let Self { shards, ledger, leases, leased, queues, .. } = self;
        let queue =
            queues.entry(epoch).or_insert_with(|| Queue::new(shards, epoch, ledger, leases));
        let held = leased.entry((worker, epoch)).or_default();
        let guided =
            queue.unleased.div_ceil(share.workers.saturating_mul(2).max(1)).max(share.records);
        let mut wanted = wanted.min(guided.saturating_sub(*held));
        let mut ranges = Vec::new();
        while wanted > 0
            && let Some(records) = queue.take(shards, wanted)
        {
            let len = records.end - records.start;
            wanted -= len;
            *held += len;
            leases.insert((epoch, records.start), Lease { end: records.end, worker });
            ranges.push(RecordRange { epoch, start: records.start, end: records.end });
        }
        if *held == 0 {
            leased.remove(&(worker, epoch));
        }
        ranges
    }

    /// Leases a whole shard to `worker`: the first that is neither done nor leased.
    pub(crate) fn lease_shard(&mut self, worker: WorkerId) -> Option<RecordRange> {
        let Self { shards, ledger, leases, leased, queues, .. } = self;
        if ledger.epoch() > 0 {
            return None;
        }
        let queue = queues.entry(0).or_insert_with(|| Queue::new(shards, 0, ledger, leases));
        let Range { start, end } = queue.take(shards, shards.records_per_shard())?;
        leases.insert((0, start), Lease { end, worker });
        *leased.entry((worker, 0)).or_default() += end - start;
        Some(RecordRange { epoch: 0, start, end })
    }

    /// Whether `range` is exactly one lease of `worker`.
    pub(crate) fn is_leased(&self, worker: WorkerId, range: RecordRange) -> bool {
        let lease = self.leases.get(&(range.epoch, range.start));
        lease.is_some_and(|lease| lease.worker == worker && lease.end == range.end)
    }

    /// Adds what the group committed up to `step` to the ledger and ends the leases on it.
    ///
    /// A step is stable when the next one commits anywhere: from then on its leases, and its
    /// epoch's end, can't come back.
    ///
    /// # Errors
    /// The first range that lies outside the data set; nothing is changed then.
    pub(crate) fn commit(&mut self, step: u64, ranges: &[RecordRange]) -> Result<(), RecordRange> {
        if let Some(&wrong) = ranges.iter().find(|r| !self.is_valid(r)) {
            return Err(wrong);
        }
        if step > self.step {
            self.step = step;
            self.unstable_leases.clear();
            self.epoch_stable = self.ledger.epoch();
        }
        for &range in ranges {
            // The group counts repetitions; the copy holds each record once.
            for missing in self.ledger.missing_of(range) {
                self.ledger.absorb(missing);
                *self.shards_done.entry(range.epoch).or_default() += self.completed_by(missing);
            }
            self.release(range);
        }
        self.close_complete();
        Ok(())
    }

    /// Checks a group's report against the data set.
    ///
    /// # Errors
    /// The first inconsistency.
    pub(crate) fn check(&self, report: &LedgerReport) -> Result<Ledger, String> {
        if report.epochs_complete > self.epochs {
            return Err(format!(
                "a ledger of {} complete epochs of {}",
                report.epochs_complete, self.epochs
            ));
        }
        if report.repeated > u64::MAX / 4 {
            return Err(format!("a ledger of {} repeated records", report.repeated));
        }
        if let Some(wrong) = report.ranges.iter().find(|r| !self.is_valid(r)) {
            return Err(format!("a ledger with {wrong}, outside the data set"));
        }
        let ranges = report.ranges.iter().copied();
        Ledger::from_parts(self.shards.records(), report.epochs_complete, ranges, report.repeated)
            .map_err(|wrong| format!("a ledger that repeats {wrong}"))
    }

    /// Replaces the cached ledger with the group's as of `step`. Every queue is rebuilt: all shards
    /// in order, less the ledger, less the leases of workers for which `keeps` holds; the leases of
    /// others end.
    ///
    /// The reporter may be the only member that has this step: leases that it ends, and the end of
    /// its epoch, can come back.
    pub(crate) fn rebuild(&mut self, step: u64, ledger: Ledger, keeps: impl Fn(WorkerId) -> bool) {
        self.epoch_stable = self.epoch_stable.min(ledger.epoch());
        (self.step, self.ledger) = (step, ledger);
        self.shards_done.clear();
        for range in self.ledger.ranges() {
            // The ledger's ranges do not touch: a shard that is absorbed lies in one of them.
            *self.shards_done.entry(range.epoch).or_default() +=
                self.shards.count_in(&range.records());
        }
        let leases = std::mem::take(&mut self.leases).into_iter();
        let leases =
            leases.map(|((epoch, start), l)| (RecordRange { epoch, start, end: l.end }, l.worker));
        let mut kept = Vec::new();
        for (range, worker) in leases.chain(std::mem::take(&mut self.unstable_leases)) {
            if keeps(worker) {
                let missing = self.ledger.missing_of(range);
                let ends = missing.iter().map(|r| r.end);
                let starts = missing.iter().map(|r| r.start).chain([range.end]);
                for (start, end) in [range.start].into_iter().chain(ends).zip(starts) {
                    if start < end {
                        self.unstable_leases.push((RecordRange { start, end, ..range }, worker));
                    }
                }
                kept.extend(missing.into_iter().map(|r| (r, worker)));
            }
        }
        self.leased.clear();
        for (range, worker) in kept {
            *self.leased.entry((worker, range.epoch)).or_default() += range.len();
            self.leases.insert((range.epoch, range.start), Lease { end: range.end, worker });
        }
        self.requeue();
    }

    /// Ends the leases of a forgotten worker. Their records are unaccounted until the next rebuild.
    pub(crate) fn forget(&mut self, worker: WorkerId) {
        self.unstable_leases.retain(|&(_, owner)| owner != worker);
        let epochs: Vec<u32> = self
            .leased
            .range((worker, 0)..=(worker, u32::MAX))
            .map(|(&(_, epoch), _)| epoch)
            .collect();
        if epochs.is_empty() {
            return;
        }
        for epoch in epochs {
            // A queue that is created later would find these records neither leased nor absorbed.
            let Self { shards, ledger, leases, queues, .. } = self;
            queues.entry(epoch).or_insert_with(|| Queue::new(shards, epoch, ledger, leases));
            self.leased.remove(&(worker, epoch));
        }
        self.leases.retain(|_, lease| lease.worker != worker);
    }

    /// Reconciles a worker's leases with the records that it reports to hold after a reconnection.
    /// Records that the ledger lacks are leased to it; those in the ledger may belong to a step
    /// that is not stable. Returns the worker's leases that it did not name; they stay leased to
    /// it.
    ///
    /// # Errors
    /// The first range that lies outside the data set, or that overlaps another worker's lease or
    /// an earlier range.
    pub(crate) fn reconcile_holdings(
        &mut self,
        worker: WorkerId,
        ranges: &[RecordRange],
    ) -> Result<Vec<RecordRange>, RecordRange> {
        let before = self.leases_of(worker);
        self.forget(worker);
        for &range in ranges {
            if !self.is_valid(&range) || self.overlapping(range).next().is_some() {
                return Err(range);
            }
            // A lease lies in one shard, even if the report merges several.
            let mut start = range.start;
            while start < range.end {
                let end = range.end.min(self.shards.range(self.shards.of(start)).end);
                self.hold_part(worker, RecordRange { start, end, ..range });
                start = end;
            }
        }
        let mut unaccounted = Vec::new();
        for lease in before {
            unaccounted.extend(self.gaps_between_leases(lease));
        }
        for &range in &unaccounted {
            self.hold_part(worker, range);
        }
        Ok(unaccounted)
    }

    /// Ends a worker's leases on those parts of `ranges` that the ledger lacks. Returns whether
    /// there were any. The records are free after [`LeaseTable::requeue`].
    pub(crate) fn release_missing(&mut self, worker: WorkerId, ranges: &[RecordRange]) -> bool {
        let unstable_leases = self.unstable_leases.len();
        let leases = self.leases_of(worker);
        let mut has_released = false;
        for missing in
            ranges.iter().flat_map(|&range| self.ledger.missing_of(range)).collect::<Vec<_>>()
        {
            for lease in leases.iter().filter(|lease| lease.epoch == missing.epoch) {
                let (start, end) = (missing.start.max(lease.start), missing.end.min(lease.end));
                if start < end {
                    self.release(RecordRange { start, end, ..missing });
                    has_released = true;
                }
            }
        }
        // They were never absorbed, so no undone step can return them.
        self.unstable_leases.truncate(unstable_leases);
        has_released
    }

    fn leases_of(&self, worker: WorkerId) -> Vec<RecordRange> {
        let of = |(&(epoch, start), lease): (&(u32, u64), &Lease)| RecordRange {
            epoch,
            start,
            end: lease.end,
        };
        self.leases.iter().filter(|(_, lease)| lease.worker == worker).map(of).collect()
    }

    /// The parts of `range` that are not leased.
    fn gaps_between_leases(&self, range: RecordRange) -> Vec<RecordRange> {
        let mut gaps = Vec::new();
        let mut from = range.start;
        for start in self.overlapping(range) {
            if from < start {
                gaps.push(RecordRange { start: from, end: start, ..range });
            }
            from = self.leases[&(range.epoch, start)].end;
        }
        if from < range.end {
            gaps.push(RecordRange { start: from, ..range });
        }
        gaps
    }

    fn hold_part(&mut self, worker: WorkerId, part: RecordRange) {
        let mut absorbed = part;
        for missing in self.ledger.missing_of(part) {
            absorbed.end = missing.start;
            self.unstable_leases.extend(Some((absorbed, worker)).filter(|_| !absorbed.is_empty()));
            absorbed = RecordRange { start: missing.end, ..part };
            *self.leased.entry((worker, part.epoch)).or_default() += missing.len();
            self.leases.insert((part.epoch, missing.start), Lease { end: missing.end, worker });
        }
        self.unstable_leases.extend(Some((absorbed, worker)).filter(|_| !absorbed.is_empty()));
    }

    /// Queues all records that are neither absorbed nor leased: no record is unaccounted any more.
    pub(crate) fn requeue(&mut self) {
        // Queues are created on request.
        self.queues.clear();
    }

    /// A report with the same totals as the cached ledger and a few ranges at most, for a job that
    /// leases nothing any more: half-way through a shuffled epoch the ledger itself has as many
    /// ranges as there are shards.
    pub(crate) fn totals(&self) -> LedgerReport {
        let (first, records) = (self.ledger.epoch(), self.shards.records());
        let mut rest = self.ledger.counted() - u64::from(first) * records;
        let mut ranges = Vec::new();
        for epoch in first..self.epochs {
            // The first epoch that is not complete lacks a record at least.
            let end = rest.min(records - u64::from(epoch == first));
            rest -= end;
            ranges.extend((end > 0).then_some(RecordRange { epoch, start: 0, end }));
            if rest == 0 {
                break;
            }
        }
        LedgerReport { epochs_complete: first, ranges, repeated: self.ledger.repeated() }
    }

    /// Whether `range` holds records of the job.
    pub(crate) fn is_valid(&self, range: &RecordRange) -> bool {
        !range.is_empty() && range.end <= self.shards.records() && range.epoch < self.epochs
    }

    /// All leases, by epoch and record.
    #[cfg(test)]
    pub(crate) fn leases(&self) -> impl Iterator<Item = (WorkerId, RecordRange)> + '_ {
        self.leases.iter().map(|(&(epoch, start), lease)| {
            (lease.worker, RecordRange { epoch, start, end: lease.end })
        })
    }

    fn release(&mut self, range: RecordRange) {
        let epoch = range.epoch;
        let overlapping: Vec<u64> = self.overlapping(range).collect();
        for start in overlapping {
            let Lease { end, worker } =
                self.leases.remove(&(epoch, start)).expect("key was just read");
            let ended =
                RecordRange { epoch, start: start.max(range.start), end: end.min(range.end) };
            self.unstable_leases.push((ended, worker));
            if start < range.start {
                self.leases.insert((epoch, start), Lease { end: range.start, worker });
            }
            if end > range.end {
                self.leases.insert((epoch, range.end), Lease { end, worker });
            }
            let held =
                self.leased.get_mut(&(worker, epoch)).expect("a worker with a lease has a count");
            *held -= ended.len();
            if *held == 0 {
                self.leased.remove(&(worker, epoch));
            }
        }
    }

    /// Number of shards that `absorbed`, which was not absorbed before, completes.
    fn completed_by(&self, absorbed: RecordRange) -> u32 {
        let (first, last) = (self.shards.of(absorbed.start), self.shards.of(absorbed.end - 1));
        // The rest of a shard that extends beyond the range may have been absorbed before.
        let is_completed = |shard: u32| {
            let Range { start, end } = self.shards.range(shard);
            let partly = start < absorbed.start || end > absorbed.end;
            partly && self.ledger.absorbed_of(RecordRange { start, end, ..absorbed }) == end - start
        };
        let edges = u32::from(is_completed(first)) + u32::from(first != last && is_completed(last));
        self.shards.count_in(&absorbed.records()) + edges
    }

    /// First records of the leases that overlap `range`.
    fn overlapping(&self, range: RecordRange) -> impl Iterator<Item = u64> + '_ {
        let epoch = range.epoch;
        // The lease that starts before the range may reach into it.
        let before = self.leases.range(..(epoch, range.start)).next_back();
        let first = match before {
            Some((&(e, start), lease)) if e == epoch && lease.end > range.start => start,
            _ => range.start,
        };
        self.leases.range((epoch, first)..(epoch, range.end)).map(|(&(_, start), _)| start)
    }

    fn close_complete(&mut self) {
        let first = self.ledger.epoch();
        self.shards_done.retain(|&epoch, _| epoch >= first);
        self.queues.retain(|&epoch, _| epoch >= first);
    }
}

/// The records of an epoch that are not leased yet.
#[derive(Debug)]
struct Queue {
    /// `None`: by number.
    order: Option<Vec<u32>>,
    /// Position in the order.
    next: u32,
    /// Records absorbed or leased when the queue was created.
    taken: RangeSet,
    /// Parts of shards before `next` that are not leased, last one first.
    parts: Vec<Range<u64>>,
    /// Records in this queue.
    unleased: u64,
}

impl Queue {
    fn new(
        shards: &Shards,
        epoch: u32,
        ledger: &Ledger,
        leases: &BTreeMap<(u32, u64), Lease>,
    ) -> Self {
        let mut ranges: Vec<Range<u64>> =
            ledger.ranges().filter(|r| r.epoch == epoch).map(|r| r.records()).collect();
        ranges
            .extend(leases.range((epoch, 0)..=(epoch, u64::MAX)).map(|(k, lease)| k.1..lease.end));
        // In order each range is appended; out of order each insertion would shift later ranges.
        ranges.sort_unstable_by_key(|r| r.start);
        let mut taken = RangeSet::default();
        for range in ranges {
            taken.insert(range);
        }
        let unleased = shards.records() - taken.len();
        Self { order: shards.order(epoch), next: 0, taken, parts: Vec::new(), unleased }
    }

    /// The next records of one shard, at most `max` of them.
    fn take(&mut self, shards: &Shards, max: u64) -> Option<Range<u64>> {
        while self.parts.is_empty() {
            if self.unleased == 0 || self.next == shards.len() {
                return None;
            }
            let shard = self.order.as_ref().map_or(self.next, |order| order[self.next as usize]);
            self.next += 1;
            self.parts = self.taken.gaps(shards.range(shard));
            self.parts.reverse();
        }
        let part = self.parts.last_mut()?;
        let records = part.start..part.end.min(part.start.saturating_add(max));
        part.start = records.end;
        if part.start == part.end {
            self.parts.pop();
        }
        self.unleased -= records.end - records.start;
        Some(records)
    }
}

/// How far ahead of the first incomplete epoch leases are given.
const EPOCHS_AHEAD: u32 = 1;
