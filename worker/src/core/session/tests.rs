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

use elasticdl_proto::{Batch, Evaluated, RangeSet};
use rand::rngs::ChaCha8Rng;
use rand::{RngExt, SeedableRng};

use super::*;
use crate::core::evaluation::{self, Scores};
use crate::core::header::{decode, encode};

mod joiners;
mod master;

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
    Evaluate(std::ops::Range<u64>),
    Result { apply: bool },
    State { take: bool },
    Step,
    Synchronize,
    ExchangeHeaders,
}

#[derive(Debug)]
struct Node {
    id: WorkerId,
    session: Session,
    inbox: VecDeque<TestMessage>,
    doing: Doing,
    /// Index of the next operation in this node's ring.
    operation: usize,
    repair: VecDeque<(Operation, usize)>,
    gradient: Absorbed,
    gradient_is_pending: bool,
    parameters: Absorbed,
    kept: Absorbed,
    /// Result of the last step, if this node has passed it on in a repair.
    passed: Option<(Absorbed, Vec<StepHeader>)>,
    finished: Option<Generation>,
}

#[derive(Clone, Debug)]
enum TestMessage {
    Drain,
    Fetch(Vec<(WorkerId, SocketAddr)>),
    Lease(RecordRange),
    Membership(Membership),
}

struct World {
    rng: ChaCha8Rng,
    seed: u64,
    epochs: u32,
    batch: Batch,
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
    leases: BTreeMap<WorkerId, Vec<RecordRange>>,
    requested: BTreeMap<(WorkerId, u32), u64>,
    queue: BTreeMap<u32, RangeSet>,
    crashes: u32,
    joins: u32,
    leaves: u32,
    highest_step: u64,
    /// Whether storage fails at times: ranks then cannot read their leased records.
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
        let crashes = rng.random_range(0..8);
        let mut world = Self {
            joins: crashes + rng.random_range(0..3),
            leaves: rng.random_range(0..3),
            rng,
            seed,
            epochs,
            batch,
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
            leases: BTreeMap::new(),
            requested: BTreeMap::new(),
            queue: BTreeMap::new(),
            crashes,
            highest_step: 0,
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
            batch: self.batch,
            checkpoints: None,
            evaluation: Some(evaluation::Plan {
                records: VALIDATION,
                every: Some(3),
                metric: "loss".into(),
                highest: false,
                patience: None,
            }),
        };
        self.nodes.push(Node {
            id,
            session: Session::new(id, plan),
            inbox: VecDeque::new(),
            doing: Doing::Nothing,
            operation: 0,
            repair: VecDeque::new(),
            gradient: Vec::new(),
            gradient_is_pending: false,
            parameters: Vec::new(),
            kept: Vec::new(),
            passed: None,
            finished: None,
        });
        if self.donors().is_empty() {
            self.ready.push(id);
        } else {
            self.fetching.push(id);
            self.send(id, TestMessage::Fetch(self.donors()));
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
        self.leases.remove(&id);
        self.requested.retain(|(worker, _), _| *worker != id);
        self.ready.retain(|w| *w != id);
        self.fetching.retain(|w| *w != id);
        self.streams.remove(&id);
        self.leaving.retain(|w| *w != id);
    }

    fn advance(&mut self, index: usize) {
        // The fence acts at once: links of generations before a loss end, also under a blocked
        // operation.
        for message in &self.nodes[index].inbox {
            if let TestMessage::Membership(Membership { abort: true, generation, .. }) = message {
                self.rings.range_mut(..generation.0).for_each(|(_, ring)| ring.broken = true);
            }
        }
        // The inbox is read between two tasks.
        let idle = matches!(self.nodes[index].doing, Doing::Nothing)
            && self.nodes[index].repair.is_empty();
        let deliver =
            if idle { self.rng.random_range(0..3).min(self.nodes[index].inbox.len()) } else { 0 };
        for _ in 0..deliver {
            let node = &mut self.nodes[index];
            match node.inbox.pop_front().expect("counted") {
                TestMessage::Drain => node.session.handle_drain(),
                TestMessage::Fetch(donors) => node.session.handle_fetch(donors),
                TestMessage::Lease(range) => node.session.handle_lease(vec![range]),
                TestMessage::Membership(membership) => node.session.handle_membership(membership),
            }
        }
        match self.nodes[index].doing {
            Doing::Nothing => self.start(index),
            Doing::Operation { .. } => self.complete(index),
        }
        let Some(node) = self.nodes.get_mut(index) else { return };
        let id = node.id;
        let reports: Vec<WorkerMessage> =
            std::iter::from_fn(|| node.session.poll_report()).collect();
        for report in reports {
            self.handle_report(id, report);
        }
    }

    fn start(&mut self, index: usize) {
        let node = &mut self.nodes[index];
        if let Some((what, from)) = node.repair.pop_front() {
            return self.enter(index, what, Some(from));
        }
        match node.session.poll() {
            Task::Compute(ranges) => {
                if !std::mem::replace(&mut node.gradient_is_pending, true) {
                    node.gradient.clear();
                }
                let records: u64 = ranges.iter().map(RecordRange::len).sum();
                let fails = self.storage_fails && self.rng.random_bool(0.3);
                let read = if fails { self.rng.random_range(0..=records) } else { records };
                let (read, unread) = cut(&ranges, read);
                node.gradient.extend(&read);
                node.session.computed(0.0, 0);
                node.session.not_read(&unread);
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
            Task::Evaluate(blocks) => self.enter(index, Operation::Evaluate(blocks), None),
            Task::Exit(exit) => {
                assert_eq!(exit, Exit::Left, "seed {}", self.seed);
                let node = self.nodes.remove(index);
                self.break_streams(node.id);
                self.forget_worker(node.id);
            }
            Task::Fetch(donor, _) => self.fetch(index, donor),
            Task::Finish => {
                node.finished = node.session.group_rank().map(|(generation, _)| generation);
                node.session.finish_reported();
            }
            Task::Repair(plan) => self.begin_repair(index, &plan),
            Task::Step => {
                self.limit_held(index);
                let node = &mut self.nodes[index];
                if !node.gradient_is_pending {
                    node.gradient.clear();
                }
                self.enter(index, Operation::Step, None);
            }
            Task::Synchronize => self.enter(index, Operation::Synchronize, None),
            Task::ExchangeHeaders => {
                self.limit_held(index);
                self.enter(index, Operation::ExchangeHeaders, None);
            }
            Task::Wait => {}
        }
    }

    fn begin_repair(&mut self, index: usize, plan: &Repair) {
        let node = &mut self.nodes[index];
        node.passed = None;
        let rank = node.session.group_rank().expect("repairs happen in groups").1;
        if plan.step.is_none() && rank == 0 {
            node.parameters.clear();
            node.session.begin();
            self.evaluations.clear();
            let holds = |n: &&Node| self.members.contains(&n.id) && n.session.step() > 0;
            let lost = self.nodes.iter().filter(holds).count();
            assert_eq!(lost, 0, "seed {}: starting anew while a member holds a state", self.seed);
        }
        let node = &mut self.nodes[index];
        if let Some((donor, behind)) = &plan.result {
            node.repair.push_back((Operation::Result { apply: behind.contains(&rank) }, *donor));
        }
        if let Some((donor, takers)) = &plan.state {
            node.repair.push_back((Operation::State { take: takers.contains(&rank) }, *donor));
        }
        if node.repair.is_empty() {
            self.repaired(index);
        }
    }

    fn repaired(&mut self, index: usize) {
        let node = &mut self.nodes[index];
        node.session.repaired();
        node.gradient_is_pending &= !node.session.pending_ranges().is_empty();
    }

    /// Storage fails for some ranks, which have read some records before.
    fn limit_held(&mut self, index: usize) {
        let session = &mut self.nodes[index].session;
        let held: u64 = session.held().map(|range| range.len()).sum();
        let fails = self.storage_fails && self.rng.random_bool(0.3);
        session.limit_held(if fails { Some(self.rng.random_range(0..=held)) } else { None });
    }

    /// Enters the next operation of the node's ring with the node's contribution.
    fn enter(&mut self, index: usize, what: Operation, from: Option<usize>) {
        let node = &mut self.nodes[index];
        let digest = fingerprint(&node.parameters);
        let (bytes, gradient) = match &what {
            Operation::Evaluate(blocks) => {
                // The score of a block depends on the parameters.
                let score =
                    |block| BTreeMap::from([("loss".to_owned(), (digest % 1000 + block) as f64)]);
                let blocks_scores = blocks.clone().map(score).collect();
                let scores = Scores {
                    records: VALIDATION,
                    first_block: blocks.start,
                    blocks: blocks_scores,
                };
                (encode(&scores), Vec::new())
            }
            Operation::Result { .. } => (
                encode(&node.session.last_headers().unwrap_or_default().to_vec()),
                node.kept.clone(),
            ),
            Operation::State { .. } => (
                node.session.state().map(|s| encode(&s.record())).unwrap_or_default(),
                node.parameters.clone(),
            ),
            Operation::Step => (encode(&node.session.header(digest)), node.gradient.clone()),
            Operation::Synchronize => (encode(&node.session.sync_header(digest)), Vec::new()),
            Operation::ExchangeHeaders => (encode(&node.session.header(digest)), Vec::new()),
        };
        let (generation, rank) = node.session.group_rank().expect("operations happen in groups");
        let ring = self.rings.get_mut(&generation.0).expect("a ring per generation");
        if ring.operations.len() <= node.operation {
            ring.operations.push(vec![None; ring.world_size]);
        }
        ring.operations[node.operation][rank] = Some(Entry { bytes, gradient: Rc::new(gradient) });
        node.doing = Doing::Operation { what, from };
    }

    /// Completes the node's operation if possible. If the ring is broken, the operation may break.
    fn complete(&mut self, index: usize) {
        let node = &mut self.nodes[index];
        let (generation, _) = node.session.group_rank().expect("operations happen in groups");
        let Doing::Operation { what, from } = &node.doing else { return };
        let ring = &self.rings[&generation.0];
        let entries = &ring.operations[node.operation];
        let complete = match from {
            Some(from) => entries[*from].is_some(),
            None => entries.iter().all(Option::is_some),
        };
        if !complete || (ring.broken && self.rng.random_bool(0.5)) {
            if ring.broken {
                node.doing = Doing::Nothing;
                node.repair.clear();
                node.session.broken(None, "reset by peer".into());
            }
            return;
        }
        let (what, from) = (what.clone(), *from);
        let entries: Vec<Option<Entry>> = entries.clone();
        node.operation += 1;
        node.doing = Doing::Nothing;
        self.finish_operation(index, &what, from.and_then(|from| entries[from].clone()), &entries);
    }

    fn finish_operation(
        &mut self,
        index: usize,
        what: &Operation,
        donor: Option<Entry>,
        all: &[Option<Entry>],
    ) {
        let seed = self.seed;
        let node = &mut self.nodes[index];
        let headers = || -> Vec<StepHeader> {
            all.iter()
                .map(|e| decode(&e.as_ref().expect("complete").bytes).expect("a header"))
                .collect()
        };
        match what {
            Operation::Evaluate(_) => {
                let scores = all.iter().map(|e| decode(&e.as_ref().expect("complete").bytes));
                let scores: Vec<Scores> = scores.map(|s| s.expect("scores")).collect();
                node.session.evaluated(&scores).unwrap_or_else(|e| panic!("seed {seed}: {e}"));
            }
            Operation::Result { apply } => {
                let donor = donor.expect("a donor");
                let headers: Vec<StepHeader> = decode(&donor.bytes).expect("headers");
                if *apply {
                    node.parameters.extend(donor.gradient.iter());
                    node.kept = donor.gradient.to_vec();
                    let (generation, _) =
                        node.session.group_rank().expect("repairs happen in groups");
                    let (passed, sum) = (headers.clone(), node.kept.clone());
                    node.session.commit(headers, Duration::ZERO);
                    self.forward_result(index, generation, &passed, &sum);
                } else {
                    node.passed = Some((donor.gradient.to_vec(), headers));
                }
            }
            Operation::State { take } => {
                let donor = donor.expect("a donor");
                if *take {
                    node.parameters = donor.gradient.to_vec();
                    let (kept, headers) = node.passed.take().unzip();
                    node.kept = kept.unwrap_or_default();
                    let state = decode(&donor.bytes).expect("a state");
                    assert!(node.session.install(state, headers), "seed {seed}");
                }
            }
            Operation::Step => {
                let sum: Absorbed = all
                    .iter()
                    .flat_map(|e| e.as_ref().expect("complete").gradient.iter().copied())
                    .collect();
                let headers = headers();
                node.session.check(&headers).unwrap_or_else(|m| panic!("seed {seed}: {m:?}"));
                let listed: Absorbed = headers.iter().flat_map(|h| h.ranges.clone()).collect();
                assert_eq!(sum, listed, "seed {seed}: headers list the records in the gradients");
                self.serve(index);
                let node = &mut self.nodes[index];
                if sum.is_empty() {
                    assert!(self.storage_fails, "seed {seed}: a step of no records");
                    return node
                        .session
                        .headers_exchanged(&headers)
                        .unwrap_or_else(|m| panic!("seed {seed}: {m:?}"));
                }
                node.parameters.extend(&sum);
                node.kept.clone_from(&sum);
                node.gradient_is_pending = false;
                let (generation, _) = node.session.group_rank().expect("steps happen in groups");
                node.session.commit(headers.clone(), Duration::ZERO);
                self.highest_step = self.highest_step.max(node.session.step());
                self.forward_result(index, generation, &headers, &sum);
            }
            Operation::Synchronize => {
                let headers: Vec<SyncHeader> = all
                    .iter()
                    .map(|e| decode(&e.as_ref().expect("complete").bytes).expect("a header"))
                    .collect();
                node.session.synced(&headers).unwrap_or_else(|m| panic!("seed {seed}: {m:?}"));
            }
            Operation::ExchangeHeaders => {
                let headers = headers();
                node.session.check(&headers).unwrap_or_else(|m| panic!("seed {seed}: {m:?}"));
                self.serve(index);
                let node = &mut self.nodes[index];
                node.session
                    .headers_exchanged(&headers)
                    .unwrap_or_else(|m| panic!("seed {seed}: {m:?}"));
            }
        }
        if matches!(what, Operation::Result { .. } | Operation::State { .. })
            && self.nodes[index].repair.is_empty()
        {
            self.repaired(index);
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
                _ => self.advance(index),
            }
        }
        let nodes: Vec<String> = self.nodes.iter().map(|n| format!("{:?}", n.session)).collect();
        panic!(
            "seed {}: the run does not end: queue {:?}, requested {:?}, members {:?} of {}: \
             {nodes:#?}",
            self.seed, self.queue, self.requested, self.members, self.generation
        );
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
fn a_drained_group_stops_together_at_one_step() {
    for seed in 0..100 {
        let mut world = World::new(seed);
        (world.crashes, world.joins, world.leaves, world.epochs) = (0, 0, 0, 1000);
        let drained = world.nodes[0].id;
        let mut ticks = 0;
        while world.nodes.iter().any(|n| n.finished.is_none()) {
            ticks += 1;
            if ticks == 500 {
                world.send(drained, TestMessage::Drain);
            }
            assert!(ticks < 100_000, "seed {seed}: the run does not end");
            let index = world.rng.random_range(0..world.nodes.len());
            world.advance(index);
        }
        let steps: Vec<u64> = world.nodes.iter().map(|n| n.session.step()).collect();
        assert!(steps.iter().all(|s| *s == steps[0]), "seed {seed}: {steps:?}");
    }
}
