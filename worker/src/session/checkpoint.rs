//! When a checkpoint is due, and how the ranks agree on one without a message or a barrier of its
//! own.
//!
//! ```text
//!   step s      headers: a rank reports that a checkpoint is due, and none is in progress
//!   commit s ─► all ranks copy their part of the state and write it while they train
//!   step s + k  headers: all parts are written ─► the first rank writes the manifest
//!   step s + m  headers: complete
//! ```
//!
//! Every rank puts what it knows into its headers, every rank receives all headers, and all
//! decisions are derived from them alone. A checkpoint belongs to the ranks that began it: if one
//! of them is lost or has abandoned it, the others abandon it too, and the next one is due at once.
//!
//! A write can hang: the server of a mounted folder may be gone, and the system call never returns.
//! After a limit such a write counts as failed. A rank has one thread for writes, so no rank begins
//! another checkpoint before the write has ended after all, and the end of the job waits only
//! briefly. A stop waits longer, and says after most of this time what it waits for: if the storage
//! returns meanwhile, the last checkpoint is written.
//!
//! **Invariant:** ranks of a group begin the same checkpoint at the same step. **Invariant:** no
//! rank waits for a checkpoint, except at the end of the job. **Invariant:** a rank has at most one
//! write at a time.

use std::collections::VecDeque;
use std::time::Duration;

use elasticdl_proto::{CheckpointEvery, Generation, WorkerId};
use serde::{Deserialize, Serialize};

/// Part of a rank's step header that concerns checkpoints.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CheckpointHeader {
    /// Whether the rank finds a checkpoint due at the end of this step.
    pub due: bool,
    /// Whether the rank is still writing, possibly for an abandoned checkpoint.
    pub busy: bool,
    /// Whether that write hangs, so that no checkpoint can be written.
    pub hangs: bool,
    /// Step of the checkpoint that the rank takes part in, and the state of its part.
    pub at: Option<(u64, Part)>,
    /// Digest of the rank's whole state at that step, once it is known.
    pub digest: Option<u64>,
    /// Step of a checkpoint whose shards and their copies differ.
    pub differs: Option<u64>,
    /// Step of the newest complete checkpoint.
    pub complete: Option<u64>,
    /// Step of the newest checkpoint that could not be written, and whether it was tried as the
    /// last one.
    pub failed: Option<(u64, bool)>,
    /// Step from which the interval to the next checkpoint is counted.
    pub interval_base: u64,
    /// Time for which the rank's training has stopped to copy its state, in microseconds.
    pub copy_us: u64,
}

impl CheckpointHeader {
    /// Step of the checkpoint that the rank takes part in, and the digest of its whole state there.
    pub fn whole(&self) -> Option<(u64, u64)> {
        self.at.map(|(step, _)| step).zip(self.digest)
    }
}

/// State of a rank's part of a checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Part {
    Failed,
    Writing,
    Written(Written),
}

/// The written part of a rank.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Written {
    pub bytes: u64,
    /// XXH3 digest of the file, 128 bits.
    pub digest: u128,
    /// The rank's file of rows, if there are tables, or of chunks.
    pub rows: Option<WrittenRows>,
}

/// The written rows of a rank, or chunks of the optimizer's state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct WrittenRows {
    pub bytes: u64,
    /// XXH3 digest of the file's index, which holds the digests of the rest.
    pub digest: u128,
    /// Sum of the touches of the rows.
    pub touches: u64,
    /// The sum, modulo 2^64, of the digests of the shards that the rank owns, once for each copy of
    /// another rank, less those of its own copies: 0 over all ranks, if all copies are equal.
    pub balance: u64,
    /// Step and generation of the checkpoint since which the file has the changes; `None`: it has
    /// all rows.
    pub base: Option<(u64, u64)>,
}

/// Task of a rank for a checkpoint, concurrent with its training. Each variant names the call that
/// reports its result.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Task {
    /// All parts are written; write the manifest: [`Checkpoints::committed`].
    Commit { step: u64, parts: Vec<Written> },
    /// Copy this part of the current state and write it: [`Checkpoints::wrote`]. `is_last`: the
    /// group ends with this state.
    Write { step: u64, generation: Generation, rank: usize, world_size: usize, is_last: bool },
}

/// Next action of a group, at the end of the job, for the final checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FinalCheckpoint {
    /// Begin a checkpoint of the final state.
    Begin,
    /// Nothing is left to do.
    Nothing,
    /// Wait for the checkpoint in progress.
    Wait,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Current {
    step: u64,
    begun: Duration,
    /// Workers that began it, in the order of their ranks at that time.
    members: Vec<WorkerId>,
    parts: Vec<Option<Written>>,
    /// Digests of the members' whole states, as far as they are known.
    digests: Vec<Option<u64>>,
    mine: Part,
    my_digest: Option<u64>,
    committing: bool,
    /// Whether the group ends with this state.
    is_last: bool,
    /// Whether the group makes no step meanwhile.
    is_awaited: bool,
}

impl Current {
    /// Whether all members held the same state.
    fn is_verified(&self) -> bool {
        self.digests.iter().all(|digest| digest.is_some() && *digest == self.digests[0])
    }
}

/// A write of this rank that has not ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Write {
    step: u64,
    /// `None` until the time is known.
    began: Option<Duration>,
    /// Whether users have been told that it takes too long.
    is_told: bool,
    hangs: bool,
}

/// What a group does while its checkpoint is written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Circumstances {
    /// The job stops.
    pub stops: bool,
    /// It makes no further step.
    pub at_end: bool,
    /// It makes no step before the checkpoint.
    pub waits: bool,
}

/// One rank's knowledge of the job's checkpoints.
#[derive(Clone, Debug)]
pub struct Checkpoints {
    me: WorkerId,
    every: Option<CheckpointEvery>,
    interval_base: u64,
    /// Start of the current interval; `None` before the first step.
    interval_began: Option<Duration>,
    complete: Option<u64>,
    failed: Option<(u64, bool)>,
    requested: bool,
    overdue: bool,
    write: Option<Write>,
    longest_write: Duration,
    now: Duration,
    /// When this rank has learned that the job stops.
    stops_since: Option<Duration>,
    /// When the job stopped, or made its last step.
    ends_since: Option<Duration>,
    waits_since: Option<Duration>,
    current: Option<Current>,
    /// Step of the checkpoint in progress, if its shards and their copies differ.
    differs: Option<u64>,
    /// Step of the checkpoint of a state that has been given up, whose manifest this rank is still
    /// writing.
    forgotten: Option<u64>,
    tasks: VecDeque<Task>,
    copy_us: u64,
}

impl Checkpoints {
    /// `every`: `None` if the job writes no checkpoints.
    pub fn new(me: WorkerId, every: Option<CheckpointEvery>) -> Self {
        Self {
            me,
            every,
            interval_base: 0,
            interval_began: None,
            complete: None,
            failed: None,
            requested: false,
            overdue: false,
            write: None,
            longest_write: Duration::ZERO,
            now: Duration::ZERO,
            stops_since: None,
            ends_since: None,
            waits_since: None,
            current: None,
            differs: None,
            forgotten: None,
            tasks: VecDeque::new(),
            copy_us: 0,
        }
    }

    pub fn are_enabled(&self) -> bool {
        self.every.is_some()
    }

    /// The user has requested a checkpoint.
    pub fn request(&mut self) {
        let is_awaited = self.current.as_ref().is_some_and(|current| current.is_awaited);
        self.requested = self.are_enabled() && !is_awaited;
    }

    /// The state comes from a checkpoint of `step`. `complete`: whether that checkpoint belongs to
    /// this job.
    pub fn restored(&mut self, step: u64, complete: bool) {
        self.interval_base = step;
        self.complete = complete.then_some(step);
    }

    /// Header of this rank for the round that makes step number `next`.
    pub fn header(&self, next: u64) -> CheckpointHeader {
        let interval_ends = |steps| next >= self.interval_base.saturating_add(steps);
        let far =
            matches!(self.every, Some(CheckpointEvery::Steps(steps)) if interval_ends(steps.get()));
        CheckpointHeader {
            due: self.current.is_none() && (self.requested || self.overdue || far),
            busy: self.write.is_some(),
            hangs: self.hangs(),
            at: self.current.as_ref().map(|current| (current.step, current.mine)),
            digest: self.current.as_ref().and_then(|current| current.my_digest),
            differs: self.differs,
            complete: self.complete,
            failed: self.failed,
            interval_base: self.interval_base,
            copy_us: self.copy_us,
        }
    }

    /// Notes that training has stopped for this time, to copy the state and to compute the
    /// `digest` of the whole state.
    pub fn copied(&mut self, took: Duration, digest: u64) {
        if let Some(current) = &mut self.current {
            current.my_digest = Some(digest);
        }
        let took_us = u64::try_from(took.as_micros()).unwrap_or(u64::MAX);
        self.copy_us = self.copy_us.saturating_add(took_us);
    }

    /// Takes in the headers of all ranks from a round of `members`.
    pub fn handle_headers(&mut self, members: &[WorkerId], headers: &[&CheckpointHeader]) {
        self.complete = self.complete.max(headers.iter().filter_map(|w| w.complete).max());
        self.failed = self.failed.max(headers.iter().filter_map(|w| w.failed).max());
        let failed = self.failed.map(|(step, _)| step);
        let known = headers.iter().map(|w| w.interval_base).chain(self.complete).chain(failed);
        self.interval_base = self.interval_base.max(known.max().unwrap_or(0));
        let Some(current) = &mut self.current else { return };
        if self.complete >= Some(current.step)
            || self.failed >= Some((current.step, current.is_last))
        {
            return self.settle();
        }
        for (rank, (member, part)) in current.members.iter().zip(&mut current.parts).enumerate() {
            let header = members.iter().position(|m| m == member).map(|rank| headers[rank]);
            let whole = header.and_then(CheckpointHeader::whole);
            if let Some((_, digest)) = whole.filter(|(step, _)| *step == current.step) {
                current.digests[rank] = Some(digest);
            }
            let at = header.and_then(|header| header.at);
            match at.filter(|(step, _)| *step == current.step) {
                Some((step, Part::Failed)) => {
                    self.failed = self.failed.max(Some((step, current.is_last)));
                    self.interval_base = self.interval_base.max(step);
                    return self.settle();
                }
                Some((_, Part::Writing)) => {}
                Some((_, Part::Written(written))) => *part = Some(written),
                // A written part stays written. Otherwise the member has abandoned this checkpoint
                // or never began it; and without the first rank there is no manifest.
                None if part.is_some() && rank > 0 => {}
                None => return self.current = None,
            }
        }
        let parts: Option<Vec<Written>> = current.parts.iter().copied().collect();
        // Each part is of one rank's state, so a checkpoint of states that differ is none.
        if let Some(parts) = parts.filter(|_| !current.committing && current.is_verified()) {
            // All ranks learn of it from the next headers, those that have joined since, too.
            let balances = parts.iter().filter_map(|part| part.rows).map(|rows| rows.balance);
            if balances.fold(0, u64::wrapping_add) != 0 {
                self.differs = Some(current.step);
                return;
            }
            current.committing = true;
            if current.members[0] == self.me {
                self.write = Some(Write::of(current.step));
                self.tasks.push_back(Task::Commit { step: current.step, parts });
            }
        }
    }

    /// Begins a checkpoint of `step`, which the group of `generation` has just committed.
    /// `is_last`: the group ends then.
    pub fn begin(
        &mut self,
        (step, is_last): (u64, bool),
        generation: Generation,
        members: &[WorkerId],
        now: Duration,
    ) {
        let Some(rank) = members.iter().position(|m| *m == self.me) else { return };
        (self.requested, self.overdue) = (false, false);
        self.write = Some(Write::of(step));
        self.current = Some(Current {
            step,
            begun: now,
            members: members.to_vec(),
            parts: vec![None; members.len()],
            digests: vec![None; members.len()],
            mine: Part::Writing,
            my_digest: None,
            committing: false,
            is_last,
            is_awaited: false,
        });
        let world_size = members.len();
        self.tasks.push_back(Task::Write { step, generation, rank, world_size, is_last });
    }

    /// The group makes no step until the checkpoint that has just begun is complete or has failed.
    pub fn await_current(&mut self) {
        self.current.iter_mut().for_each(|current| current.is_awaited = true);
    }

    /// Whether a group of one rank makes no step before a checkpoint: the master, which knows why
    /// the other ranks have ended, has asked for it.
    pub fn precedes_step(&self) -> bool {
        self.requested || self.current.as_ref().is_some_and(|current| current.is_awaited)
    }

    /// Advances the time. To be called at each commit.
    pub fn tick(&mut self, now: Duration) {
        let since = *self.interval_began.get_or_insert(now);
        let is_first = self.complete.is_none() && self.failed.is_none();
        let after = |time: Duration| if is_first { time.min(FIRST_AFTER) } else { time };
        let elapsed = now.saturating_sub(since);
        self.overdue |=
            matches!(self.every, Some(CheckpointEvery::Time(time)) if elapsed >= after(time));
    }

    /// A new group has formed. A checkpoint with a lost member is abandoned, unless only the first
    /// rank's manifest is missing.
    pub fn regrouped(&mut self, members: &[WorkerId]) {
        self.current.take_if(|current| {
            let awaited =
                if current.committing { &current.members[..1] } else { &current.members[..] };
            awaited.iter().any(|member| !members.contains(member))
        });
    }

    /// This rank's part of `step` is written, or could not be.
    pub fn wrote(&mut self, step: u64, part: Result<Written, ()>) {
        self.end_write(part.is_ok());
        if let Some(current) = self.current.as_mut().filter(|current| current.step == step) {
            current.mine = part.map_or(Part::Failed, Part::Written);
        }
    }

    /// The group gives up its state. What follows is counted from the one that it creates.
    pub fn forget(&mut self) {
        // Only the first rank writes a manifest.
        let writes = |current: &Current| current.committing && current.members[0] == self.me;
        let manifest = self.current.take().filter(writes).map(|current| current.step);
        self.forgotten = manifest.or(self.forgotten);
        self.differs = None;
        (self.interval_base, self.complete, self.failed) = (0, None, None);
        (self.interval_began, self.overdue) = (None, false);
    }

    /// The manifest of `step` is written, or could not be.
    pub fn committed(&mut self, step: u64, is_written: bool) {
        self.end_write(is_written);
        if self.forgotten.take_if(|forgotten| *forgotten == step).is_none() {
            self.note_result(step, is_written);
        }
    }

    /// Notes the time and what the group does. Returns the step of a write that takes too long,
    /// once: it counts as failed from now on or, in a job that stops, soon.
    pub fn poll_hung(&mut self, now: Duration, circumstances: Circumstances) -> Option<u64> {
        let Circumstances { stops, at_end, waits } = circumstances;
        self.now = now;
        if stops {
            self.stops_since.get_or_insert(now);
        }
        if stops || at_end {
            self.ends_since.get_or_insert(now);
        }
        self.waits_since = match waits && self.is_writing() {
            true => self.waits_since.or(Some(now)),
            false => None,
        };
        let (limit, stops_since) = (self.limit(), self.stops_since);
        let write = self.write.as_mut().filter(|write| !write.hangs)?;
        let began = *write.began.get_or_insert(now);
        let is_late = |since: Duration, limit| now.saturating_sub(since) > limit;
        // Each write has the whole time of a stop.
        let stop_is_late =
            |limit| stops_since.is_some_and(|since| is_late(since.max(began), limit));
        write.hangs = is_late(began, limit) || stop_is_late(WRITE_AT_STOP);
        let was_told = write.is_told;
        write.is_told |= write.hangs || stop_is_late(TOLD_AT_STOP);
        let Write { step, is_told, hangs, .. } = *write;
        if hangs {
            self.note_result(step, false);
        }
        (is_told && !was_told).then_some(step)
    }

    /// How long a write may take while the job does not stop.
    fn limit(&self) -> Duration {
        match self.longest_write {
            Duration::ZERO => WRITE_UNKNOWN,
            longest => WRITE_MIN.max(longest * USUAL_TIMES),
        }
    }

    /// How long the group has been waiting for a checkpoint and how long it waits at most; `None`:
    /// it does not wait.
    pub fn waits_for(&self) -> Option<(Duration, Duration)> {
        let limit = if self.stops_since.is_some() { WRITE_AT_STOP } else { self.limit() };
        self.waits_since.map(|since| (self.now.saturating_sub(since), limit))
    }

    /// Whether no checkpoint can be written because a write of this rank hangs.
    pub fn hangs(&self) -> bool {
        let ends_since = self.ends_since.map(|since| self.now.saturating_sub(since));
        let has_waited = ends_since.is_none_or(|waited| waited > HUNG_AT_END);
        has_waited && self.write.is_some_and(|write| write.hangs)
    }

    /// Whether users have been told that a write of this rank takes too long.
    pub fn is_told(&self) -> bool {
        self.write.is_some_and(|write| write.is_told)
    }

    /// Whether this rank writes, or takes part in a checkpoint.
    fn is_writing(&self) -> bool {
        self.write.is_some() || self.current.is_some()
    }

    pub fn poll(&mut self) -> Option<Task> {
        self.tasks.pop_front()
    }

    fn end_write(&mut self, is_written: bool) {
        let began = self.write.take().and_then(|write| write.began);
        if let Some(began) = began.filter(|_| is_written) {
            self.longest_write = self.longest_write.max(self.now.saturating_sub(began));
        }
    }

    fn note_result(&mut self, step: u64, is_written: bool) {
        if is_written {
            self.complete = self.complete.max(Some(step));
        } else {
            let is_last = self.current.as_ref().is_some_and(|now| now.step == step && now.is_last);
            self.failed = self.failed.max(Some((step, is_last)));
        }
        self.interval_base = self.interval_base.max(step);
        if self.current.as_ref().is_some_and(|current| current.step <= step) {
            self.settle();
        }
    }

    /// The checkpoint in progress is complete or has failed.
    fn settle(&mut self) {
        if let Some(current) = self.current.take() {
            self.interval_began = Some(current.begun);
            self.overdue = false;
        }
    }
}

impl Write {
    fn of(step: u64) -> Self {
        Self { step, began: None, is_told: false, hangs: false }
    }
}

/// Whether a checkpoint begins at the end of this step.
pub fn begins(headers: &[&CheckpointHeader]) -> bool {
    headers.iter().any(|w| w.due) && !is_in_progress(headers)
}

/// Next action of a group that has committed its last `step`, before it ends. One that was tried
/// before the group knew that it ends was not tried for as long as the last one is.
pub fn final_checkpoint(headers: &[&CheckpointHeader], step: u64) -> FinalCheckpoint {
    checkpoint_of(headers, (step, true))
}

/// Next action of a group that wants a checkpoint of its `step` before the next one. `is_last`:
/// whether one that failed before it was the last one is tried again.
pub fn checkpoint_of(
    headers: &[&CheckpointHeader],
    (step, is_last): (u64, bool),
) -> FinalCheckpoint {
    let settled = headers
        .iter()
        .any(|w| w.hangs || w.complete >= Some(step) || w.failed >= Some((step, is_last)));
    if settled || step == 0 {
        FinalCheckpoint::Nothing
    } else if is_in_progress(headers) {
        FinalCheckpoint::Wait
    } else {
        FinalCheckpoint::Begin
    }
}

fn is_in_progress(headers: &[&CheckpointHeader]) -> bool {
    headers.iter().any(|w| w.busy || w.at.is_some())
}

/// Upper bound of a job's first interval: without any checkpoint, the loss of all workers loses all
/// work.
pub const FIRST_AFTER: Duration = Duration::from_secs(30);

/// The limit of a write before one has shown how long it takes. A disk that writes 10 MB/s takes so
/// long for 36 GB.
const WRITE_UNKNOWN: Duration = Duration::from_secs(3600);
/// The least limit that is learned. Requests that fail are repeated for ten minutes.
const WRITE_MIN: Duration = Duration::from_secs(900);
/// A write this many times as long as usual hangs.
const USUAL_TIMES: u32 = 20;
/// How long a stop waits for a write.
pub const WRITE_AT_STOP: Duration = Duration::from_secs(55);
/// When the master hears of that, from which the stop has another minute: it would give the state
/// up after the first.
const TOLD_AT_STOP: Duration = Duration::from_secs(45);
/// How long the end of a job waits for a write that hung before.
const HUNG_AT_END: Duration = Duration::from_secs(15);

#[cfg(test)]
mod tests;
