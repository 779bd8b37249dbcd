//! Sessions against one another: a small master, a group on a simulated ring, and crashes at any
//! point.
//!
//! The oracle is independent of the sessions: a replica's "parameters" are the list of records that
//! its updates contained. At the end they must hold every record of every epoch exactly once, on
//! every rank.

use std::collections::{BTreeMap, VecDeque};
use std::net::SocketAddr;
use std::num::NonZeroU64;
use std::rc::Rc;
use std::time::Duration;

use elasticdl_proto::{
    Batch, Evaluated, Generation, Ledger, LedgerReport, Membership, RangeSet, RecordRange,
};
use rand::rngs::ChaCha8Rng;
use rand::{RngExt, SeedableRng};

use super::*;
use crate::session::evaluation::{self, Scores};
use crate::session::header::{StateRecord, decode, encode};
use crate::session::plan::StepSize;

mod joiners;
mod master;
mod operations;
pub(super) mod pair;

use joiners::Stream;

fn nonzero(records: u64) -> NonZeroU64 {
    NonZeroU64::new(records).unwrap()
}

const RECORDS: u64 = 60;
/// Three blocks.
const VALIDATION: u64 = 600;

/// Records that a replica has absorbed; they stand for its parameters.
type Absorbed = Vec<RecordRange>;

/// One rank's entry into one collective operation.
#[derive(Clone, Debug)]
struct Entry {
    bytes: Vec<u8>,
    gradient: Rc<Absorbed>,
}

/// Links of one generation: operations in order, each with an entry per rank.
#[derive(Clone, Debug, Default)]
struct Ring {
    world_size: usize,
    operations: Vec<Vec<Option<Entry>>>,
    broken: bool,
}

#[derive(Debug)]
enum Doing {
    Nothing,
    /// In a collective operation that needs the entry of every rank, or of one rank only.
    Operation {
        what: Operation,
        from: Option<usize>,
    },
}

#[derive(Clone, Debug)]
enum Operation {
    Broadcast(Broadcast),
    Evaluate(std::ops::Range<u64>),
    Step,
    Synchronize,
    ExchangeHeaders,
}

#[derive(Debug)]
struct Node {
    id: WorkerId,
    session: Session,
    inbox: VecDeque<MasterMessage>,
    doing: Doing,
    /// Index of the next operation in this node's ring.
    operation: usize,
    gradient: Absorbed,
    /// Sum of the step that is being committed.
    reduced: Absorbed,
    parameters: Absorbed,
    kept: Absorbed,
    finished: Option<Generation>,
}

struct World {
    rng: ChaCha8Rng,
    seed: u64,
    epochs: u32,
    batch: Batch,
    micro_batch: u64,
    next: u64,
    nodes: Vec<Node>,
    rings: BTreeMap<u64, Ring>,
    // ---- the master ----
    generation: Generation,
    members: Vec<WorkerId>,
    formed: bool,
    ready: Vec<WorkerId>,
    /// Joining workers that fetch the state, and the messages to them.
    fetching: Vec<WorkerId>,
    streams: BTreeMap<WorkerId, Stream>,
    leaving: Vec<WorkerId>,
    crashes: u32,
    joins: u32,
    leaves: u32,
    highest_step: u64,
    /// Bit flips to come, and so far.
    flips: u32,
    flipped: u32,
    /// Whether storage fails at times: ranks then cannot read their records.
    storage_fails: bool,
    /// Reports of the lowest ranks, by step.
    evaluations: BTreeMap<u64, BTreeMap<String, Option<f64>>>,
}

impl World {
    fn new(seed: u64) -> Self {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let epochs = rng.random_range(1..4);
        let batch = match rng.random_range(0..3) {
            0 => Batch::PerWorker(nonzero(rng.random_range(1..5))),
            _ => Batch::Global(nonzero(rng.random_range(1..12))),
        };
        let micro_batch = rng.random_range(1..4);
        let crashes = rng.random_range(0..8);
        let mut world = Self {
            joins: crashes + rng.random_range(0..3),
            leaves: rng.random_range(0..3),
            rng,
            seed,
            epochs,
            batch,
            micro_batch,
            next: 0,
            nodes: Vec::new(),
            rings: BTreeMap::new(),
            generation: Generation(0),
            members: Vec::new(),
            formed: true,
            ready: Vec::new(),
            fetching: Vec::new(),
            streams: BTreeMap::new(),
            leaving: Vec::new(),
            crashes,
            highest_step: 0,
            flips: 0,
            flipped: 0,
            storage_fails: false,
            evaluations: BTreeMap::new(),
        };
        for _ in 0..world.rng.random_range(1..5) {
            world.join();
        }
        world
    }

    fn join(&mut self) {
        self.next += 1;
        let id = WorkerId(self.next);
        let plan = JobPlan {
            records: RECORDS,
            epochs: self.epochs,
            max_steps: None,
            size: StepSize { batch: self.batch, micro_batch: self.micro_batch },
            checkpoints: None,
            evaluation: Some(evaluation::Plan {
                records: VALIDATION,
                every: Some(3),
                metric: "loss".into(),
                highest: false,
                patience: None,
            }),
            skips_nonfinite: false,
            allows_mixed_builds: false,
            exports_best: self.seed.is_multiple_of(2),
        };
        self.nodes.push(Node {
            id,
            session: Session::new(id, plan),
            inbox: VecDeque::new(),
            doing: Doing::Nothing,
            operation: 0,
            gradient: Vec::new(),
            reduced: Vec::new(),
            parameters: Vec::new(),
            kept: Vec::new(),
            finished: None,
        });
        if self.donors().is_empty() {
            self.ready.push(id);
        } else {
            self.fetching.push(id);
            self.send(id, MasterMessage::Fetch(self.donors()));
        }
        self.switch();
    }

    // ---- the workers ----

    /// The process `index` crashes without a message.
    fn crash(&mut self, index: usize) {
        let node = self.nodes.remove(index);
        self.break_streams(node.id);
        self.forget_worker(node.id);
        if let Some((generation, _)) = node.session.group_rank() {
            self.rings.get_mut(&generation.0).expect("a ring per generation").broken = true;
        }
        if let Phase::Joining(membership) = &node.session.phase {
            self.rings.get_mut(&membership.generation.0).expect("a ring per generation").broken =
                true;
        }
        if self.members.contains(&node.id) {
            // Links and master learn of a loss independently; here the master learns of it at once.
            self.publish(true);
        }
    }

    fn forget_worker(&mut self, id: WorkerId) {
        self.ready.retain(|w| *w != id);
        self.fetching.retain(|w| *w != id);
        self.streams.remove(&id);
        self.leaving.retain(|w| *w != id);
    }

    fn advance(&mut self, index: usize) {
        // The fence acts at once: links of generations before a loss end, also under a blocked
        // operation.
        for message in &self.nodes[index].inbox {
            if let MasterMessage::Membership(Membership { abort: true, generation, .. }) = message {
                self.rings.range_mut(..generation.0).for_each(|(_, ring)| ring.broken = true);
            }
        }
        // The inbox is read between two tasks.
        let idle = matches!(self.nodes[index].doing, Doing::Nothing);
        let deliver =
            if idle { self.rng.random_range(0..3).min(self.nodes[index].inbox.len()) } else { 0 };
        for _ in 0..deliver {
            let node = &mut self.nodes[index];
            node.session.handle(node.inbox.pop_front().expect("counted"));
        }
        match self.nodes[index].doing {
            Doing::Nothing => {
                self.serve(index);
                self.start(index);
            }
            Doing::Operation { .. } => self.complete(index),
        }
        let Some(node) = self.nodes.get_mut(index) else { return };
        let id = node.id;
        let reports: Vec<WorkerMessage> =
            std::iter::from_fn(|| node.session.reports.poll()).collect();
        for report in reports {
            self.handle_report(id, report);
        }
    }

    fn start(&mut self, index: usize) {
        let node = &mut self.nodes[index];
        match node.session.poll() {
            Task::Broadcast { root, what } => {
                self.enter(index, Operation::Broadcast(what), Some(root));
            }
            Task::Compute { ranges, is_first } => {
                if is_first {
                    node.gradient.clear();
                }
                let records: u64 = ranges.iter().map(RecordRange::len).sum();
                let fails = self.storage_fails && self.rng.random_bool(0.3);
                let read = if fails { self.rng.random_range(0..=records) } else { records };
                // A deterministic job computes whole micro-batches.
                let (read, unread) = if self.seed % 2 == 1 {
                    whole(&node.session.micro_batches(&ranges), &ranges, read)
                } else {
                    cut(&ranges, read)
                };
                node.gradient.extend(&read);
                // Ranks differ in speed, and change it.
                let compute_us = records * self.rng.random_range(1..1000) * index as u64;
                node.session.assignment.computed(Computed { compute_us, ..Default::default() });
                node.session.assignment.not_read(&unread);
            }
            Task::Connect(membership) => {
                self.end_streams(index, &membership);
                let node = &mut self.nodes[index];
                node.operation = 0;
                if self.rings[&membership.generation.0].broken {
                    node.session.broken(None, "refused".into());
                } else {
                    node.session.connected();
                }
            }
            Task::CreateState => {
                node.parameters.clear();
                node.session.begin();
                self.evaluations.clear();
                let holds = |n: &&Node| self.members.contains(&n.id) && n.session.step() > 0;
                let lost = self.nodes.iter().filter(holds).count();
                let seed = self.seed;
                assert_eq!(lost, 0, "seed {seed}: starting anew while a member holds a state");
            }
            Task::EndRepair => node.session.repaired(),
            Task::Evaluate(blocks) => self.enter(index, Operation::Evaluate(blocks), None),
            Task::Exit(exit) => {
                assert_eq!(exit, Exit::Left, "seed {}", self.seed);
                let node = self.nodes.remove(index);
                self.break_streams(node.id);
                self.forget_worker(node.id);
            }
            Task::Fetch(donor, _) => self.fetch(index, donor),
            Task::Finish { is_published } => {
                let is_lowest = node.session.group_rank().is_some_and(|(_, rank)| rank == 0);
                assert_eq!(is_published, is_lowest, "seed {}", self.seed);
                node.session.finish(FinalState {
                    digest: fingerprint(&node.parameters),
                    parameters_are_finite: true,
                    summary: None,
                    is_exported: false,
                    export_error: None,
                    row_touches: None,
                });
            }
            task @ (Task::BuildNccl | Task::HandOver { .. } | Task::InspectGradient) => {
                panic!("seed {}: {task:?} without GPUs, tables, infinite gradients", self.seed)
            }
            Task::Step { is_empty } => {
                self.limit_readable(index);
                let node = &mut self.nodes[index];
                if is_empty {
                    node.gradient.clear();
                }
                self.enter(index, Operation::Step, None);
            }
            Task::Synchronize => self.enter(index, Operation::Synchronize, None),
            Task::Update { is_applied, .. } => {
                assert!(is_applied, "seed {}", self.seed);
                self.update(index);
            }
            Task::ExchangeHeaders { .. } => {
                self.limit_readable(index);
                self.enter(index, Operation::ExchangeHeaders, None);
            }
            Task::Wait => {}
        }
    }

    /// Applies the step that was summed, or fetched from a donor.
    fn update(&mut self, index: usize) {
        let node = &self.nodes[index];
        let state = node.session.state().expect("an update changes a state");
        self.check_step(state.step, &state.ledger, &node.reduced);
        let node = &mut self.nodes[index];
        let group = node.session.group_rank();
        node.parameters.extend(&node.reduced);
        node.kept.clone_from(&node.reduced);
        node.session.updated(Duration::ZERO);
        self.highest_step = self.highest_step.max(node.session.step());
        if let Some((generation, _)) = group {
            let headers = node.session.last_headers().expect("just committed").to_vec();
            let sum = node.kept.clone();
            self.forward_result(index, generation, &headers, &sum);
        }
    }

    /// Storage fails for some ranks, which have read some records before.
    fn limit_readable(&mut self, index: usize) {
        let session = &mut self.nodes[index].session;
        let upcoming: u64 = session.assignment.upcoming().iter().map(RecordRange::len).sum();
        let fails = self.storage_fails && self.rng.random_bool(0.3);
        session.assignment.limit_readable(fails.then(|| self.rng.random_range(0..=upcoming)));
    }

    /// The records of a step depend on its number alone, or follow those of the step before.
    fn check_step(&self, step: u64, ledger: &Ledger, records: &Absorbed) {
        let mut set = RangeSet::default();
        records.iter().for_each(|range| assert_eq!(set.insert(range.records()), 0));
        let ranges: Vec<_> = set.iter().collect();
        let [range] = &ranges[..] else { panic!("seed {}: {ranges:?}", self.seed) };
        assert!(records.iter().all(|range| range.epoch == ledger.epoch()));
        assert_eq!(range.start, RECORDS - ledger.remaining(ledger.epoch()), "seed {}", self.seed);
        if let Batch::Global(batch) = self.batch {
            let per_epoch = RECORDS.div_ceil(batch.get());
            let start = step % per_epoch * batch.get();
            let expected = start..RECORDS.min(start + batch.get());
            assert_eq!(*range, expected, "seed {}: step {step}", self.seed);
        }
    }

    // ---- the run ----

    fn run(&mut self) {
        for _ in 0..200_000 {
            if self.nodes.is_empty() {
                self.members.clear();
                self.formed = true;
                self.join();
            }
            let is_member = |n: &&Node| self.members.contains(&n.id);
            let done = |n: &Node| n.finished == Some(self.generation);
            if self.formed && self.ready.is_empty() && self.nodes.iter().filter(is_member).all(done)
            {
                return self.check();
            }
            let index = self.rng.random_range(0..self.nodes.len());
            match self.rng.random_range(0..400) {
                0 if self.crashes > 0 => {
                    self.crashes -= 1;
                    self.crash(index);
                    if self.nodes.is_empty() {
                        self.members.clear();
                        self.formed = true;
                    }
                }
                1 if self.joins > 0 => {
                    self.joins -= 1;
                    self.join();
                }
                2 if self.leaves > 0 && self.nodes.len() > 1 => {
                    self.leaves -= 1;
                    let id = self.nodes[index].id;
                    if self.members.contains(&id) && !self.leaving.contains(&id) {
                        self.leaving.push(id);
                        self.switch();
                    }
                }
                3 if self.flips > 0 && self.may_flip(index) => {
                    self.flips -= 1;
                    self.flip(index);
                }
                _ => self.advance(index),
            }
        }
        let nodes: Vec<String> = self.nodes.iter().map(|n| format!("{:?}", n.session)).collect();
        panic!(
            "seed {}: the run does not end: members {:?} of {}: {nodes:#?}",
            self.seed, self.members, self.generation
        );
    }

    /// Whether this node is one of three or more members whose states are equal.
    fn may_flip(&self, index: usize) -> bool {
        let of_group = |n: &&Node| n.session.in_round() == Some(self.generation);
        let states: Vec<&Absorbed> =
            self.nodes.iter().filter(of_group).map(|node| &node.parameters).collect();
        let equal = |states: &[&Absorbed]| states.windows(2).all(|pair| pair[0] == pair[1]);
        self.formed
            && of_group(&&self.nodes[index])
            && states.len() >= 3
            && states.len() == self.members.len()
            && equal(&states)
    }

    fn check(&self) {
        let is_member = |n: &&Node| self.members.contains(&n.id);
        for node in self.nodes.iter().filter(is_member) {
            let mut seen = vec![0; (u64::from(self.epochs) * RECORDS) as usize];
            for range in &node.parameters {
                for record in range.records() {
                    seen[(u64::from(range.epoch) * RECORDS + record) as usize] += 1;
                }
            }
            assert!(
                seen.iter().all(|&n| n == 1),
                "seed {}: worker {}: {seen:?}",
                self.seed,
                node.id
            );
            let ledger = &node.session.state().expect("finished with a state").ledger;
            assert_eq!(
                (ledger.counted(), ledger.repeated()),
                (seen.len() as u64, 0),
                "seed {}",
                self.seed
            );
            let first = self.nodes.iter().find(is_member).expect("a group has members");
            assert_eq!(node.parameters, first.parameters, "seed {}: replicas differ", self.seed);
        }
    }
}

/// The first `records` records of `ranges`, and the rest.
fn cut(ranges: &[RecordRange], mut records: u64) -> (Absorbed, Absorbed) {
    let (mut first, mut rest) = (Absorbed::new(), Absorbed::new());
    for range in ranges {
        let middle = range.start + range.len().min(records);
        records -= middle - range.start;
        first.extend(Some(RecordRange { end: middle, ..*range }).filter(|range| !range.is_empty()));
        rest.extend(
            Some(RecordRange { start: middle, ..*range }).filter(|range| !range.is_empty()),
        );
    }
    (first, rest)
}

/// As [`cut`], at the end of a micro-batch; of the rest, the last micro-batch comes first.
fn whole(
    micro_batches: &[RecordRange],
    ranges: &[RecordRange],
    records: u64,
) -> (Absorbed, Absorbed) {
    let (mut count, mut read) = (0, 0);
    while let Some(next) = micro_batches.get(count).filter(|next| read + next.len() <= records) {
        read += next.len();
        count += 1;
    }
    (cut(ranges, read).0, micro_batches[count..].iter().rev().copied().collect())
}

fn address() -> SocketAddr {
    ([127, 0, 0, 1], 1).into()
}

fn fingerprint(parameters: &Absorbed) -> u64 {
    parameters.iter().fold(7, |hash, r| {
        (hash ^ r.start ^ (r.end << 20) ^ (u64::from(r.epoch) << 40)).wrapping_mul(0x100_0000_01b3)
    })
}

#[test]
fn every_record_is_absorbed_exactly_once_despite_crashes_joins_and_leaves() {
    for seed in 0..2000 {
        World::new(seed).run();
    }
}

#[test]
fn every_record_is_absorbed_exactly_once_while_storage_fails_at_times() {
    for seed in 0..1000 {
        let mut world = World::new(seed);
        world.storage_fails = true;
        world.run();
    }
}

#[test]
fn a_flipped_bit_in_one_of_three_replicas_is_in_no_final_state() {
    let mut flipped = 0;
    for seed in 0..400 {
        let mut world = World::new(seed);
        (world.crashes, world.leaves, world.flips) = (0, 0, 1);
        world.joins += 2;
        world.run();
        flipped += world.flipped;
        let is_wrong = |node: &Node| node.parameters.iter().any(RecordRange::is_empty);
        assert!(!world.nodes.iter().any(is_wrong), "seed {seed}");
    }
    assert!(flipped > 50, "{flipped}");
}

#[test]
fn replicas_that_differ_amid_crashes_and_joins_end_at_one_state() {
    let mut flipped = 0;
    for seed in 0..400 {
        let mut world = World::new(seed);
        world.flips = 3;
        world.run();
        flipped += world.flipped;
    }
    assert!(flipped > 50, "{flipped}");
}

#[test]
fn a_drained_group_stops_together_at_one_step() {
    for seed in 0..100 {
        let mut world = World::new(seed);
        (world.crashes, world.joins, world.leaves, world.epochs) = (0, 0, 0, 1000);
        let drained = world.nodes[0].id;
        let mut ticks = 0;
        while world.nodes.iter().any(|n| n.finished.is_none()) {
            ticks += 1;
            if ticks == 500 {
                world.send(drained, MasterMessage::Drain);
            }
            assert!(ticks < 100_000, "seed {seed}: the run does not end");
            let index = world.rng.random_range(0..world.nodes.len());
            world.advance(index);
        }
        let steps: Vec<u64> = world.nodes.iter().map(|n| n.session.step()).collect();
        assert!(steps.iter().all(|s| *s == steps[0]), "seed {seed}: {steps:?}");
    }
}
