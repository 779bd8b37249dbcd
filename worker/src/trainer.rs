//! Does what the session decides: computes, talks to the group, applies updates.
//!
//! One thread, blocking calls. What the master says arrives in an inbox between two tasks; what can't wait (a lost
//! member) reaches a blocked collective call through the group's fence.

use std::net::SocketAddr;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use elasticdl_collective::{
    CollectiveError, Communicator, Endpoint, GroupSpec, Member, StateReceiver, TcpRing,
};
use elasticdl_proto::{Generation, RecordRange, WorkerId};

use crate::core::header::{self, StateRecord, StepHeader};
use crate::core::repair::{Mismatch, Repair};
use crate::core::session::{Exit, Membership, Misfit, Session, Task};
use crate::core::swap::Elsewhere;
use crate::donor::{self, Donor, KIND_END, KIND_RESULT, KIND_STATE, KIND_TIP, StateNote};
use crate::failure::{Failure, call_user};
use crate::gap::Gap;
use crate::messages::{Finished, FromMaster, Outbox, ToMaster};
use crate::model::{Model, NamedTensor, Update};
use crate::prefetch::Prefetch;
use crate::reader::Reader;
use crate::tensors::{Tensors, writable};
use crate::weights;

/// One worker's training, from its first membership to its end.
pub(crate) struct Trainer<'a, M: Model> {
    model: M,
    seed: u64,
    session: Session,
    tensors: Tensors,
    /// `gradient` holds what the session has pending, and not an older step's.
    gradient_is_pending: bool,
    prefetch: Prefetch<<M::Reader as Reader>::Record>,
    export: Option<Export>,
    endpoint: Endpoint,
    ring: Option<TcpRing>,
    /// Newcomers that get the state from here.
    donor: Donor,
    checkpoints: Checkpointing,
    /// `None` where nothing is evaluated.
    validation: Option<Validation<M::Reader>>,
    /// Where this worker gets it from, as a newcomer.
    source: Option<StateReceiver>,
    /// How long a peer may be silent on a link beside the ring.
    patience: Duration,
    inbox: &'a Receiver<FromMaster>,
    outbox: Outbox,
    started: Instant,
    gap: Gap,
    /// The last task was a talk: wait a little before the next one.
    talked: bool,
}

/// Where the final model goes.
#[derive(Debug)]
pub(crate) struct Export {
    pub(crate) address: String,
    pub(crate) layout: Vec<NamedTensor>,
}

/// Why a task was not done.
#[derive(Debug)]
enum Stopped {
    /// The links broke; a new group will form.
    Broken(CollectiveError),
    /// This worker, or the job, can't go on.
    Failed(Failure),
}

/// Why nothing was fetched.
enum FetchError {
    /// The donor is gone, or does not do what it should.
    Donor(String),
    /// This worker can't go on.
    Stopped(Stopped),
}

impl<'a, M: Model> Trainer<'a, M> {
    pub(crate) fn new(
        (model, seed): (M, u64),
        session: Session,
        tensors: Tensors,
        prefetch: Prefetch<<M::Reader as Reader>::Record>,
        (endpoint, patience): (Endpoint, Duration),
        (checkpoints, validation): (Checkpointing, Option<Validation<M::Reader>>),
        (inbox, outbox): (&'a Receiver<FromMaster>, Outbox),
    ) -> Self {
        Self {
            model,
            seed,
            session,
            tensors,
            gradient_is_pending: false,
            prefetch,
            export: None,
            endpoint,
            ring: None,
            donor: Donor::new(patience),
            checkpoints,
            validation,
            source: None,
            patience,
            inbox,
            outbox,
            started: Instant::now(),
            gap: Gap::default(),
            talked: false,
        }
    }

    /// Writes the final model there.
    pub(crate) fn exporting(self, export: Option<Export>) -> Self {
        Self { export, ..self }
    }

    /// Trains until the master, the session or a failure ends it.
    pub(crate) fn run(mut self) -> Result<Exit, Failure> {
        loop {
            while let Ok(message) = self.inbox.try_recv() {
                self.handle(message);
            }
            self.receive_visitors();
            let task = self.session.poll();
            let talk = task == Task::Talk;
            let done = match task {
                Task::Exit(exit) => return Ok(exit),
                task => self.perform(task),
            };
            self.talked = talk;
            match done {
                Ok(()) => {}
                Err(Stopped::Broken(error)) => self.on_broken(&error),
                Err(Stopped::Failed(failure)) => return Err(failure),
            }
            self.tend_checkpoints();
            self.send_reports();
        }
    }

    fn handle(&mut self, message: FromMaster) {
        match message {
            FromMaster::Drain => self.session.handle_drain(),
            FromMaster::Fetch(donors) => self.session.handle_fetch(donors),
            FromMaster::KeepCheckpoint => self.session.handle_checkpoint(),
            FromMaster::Lease(ranges) => {
                for range in &ranges {
                    self.prefetch.want(*range);
                }
                self.session.handle_lease(ranges);
            }
            FromMaster::Membership(membership, arrived) => {
                if membership.abort {
                    self.gap.on_trouble(arrived);
                }
                self.session.handle_membership(membership);
            }
            FromMaster::Reconnected => {
                self.session.reconnected();
                self.send_reports();
            }
            FromMaster::Shutdown(reason) => self.session.handle_shutdown(reason),
            // Asked and answered before the training began.
            FromMaster::Describe | FromMaster::Prepare(_) => {}
        }
    }

    fn perform(&mut self, task: Task) -> Result<(), Stopped> {
        match task {
            Task::Compute(ranges) => self.compute(&ranges).map_err(Stopped::Failed),
            Task::Connect(membership) => self.connect(&membership),
            Task::Evaluate(blocks) => self.evaluate(blocks),
            Task::Exit(_) => Ok(()),
            Task::Fetch(donor, address) => self.fetch(donor, address),
            Task::Finish => self.finish().map_err(Stopped::Failed),
            Task::Repair(plan) => self.repair(&plan),
            Task::Step => self.step(),
            Task::Synchronize => self.synchronize(),
            Task::Talk => self.talk(),
            Task::Wait => {
                match self.inbox.recv() {
                    Ok(message) => self.handle(message),
                    Err(_) => self.session.handle_shutdown("the control stream's thread ended".into()),
                }
                Ok(())
            }
        }
    }

    fn connect(&mut self, membership: &Membership) -> Result<(), Stopped> {
        self.ring = None;
        self.source = None;
        self.gap.on_membership(Instant::now());
        let is_member = |id| membership.members.iter().any(|(member, _)| member.0 == id);
        self.donor.switch(membership.generation, is_member);
        let members =
            membership.members.iter().map(|(id, address)| Member { id: id.0, address: *address }).collect();
        let spec = GroupSpec { generation: membership.generation.0, members };
        self.ring = Some(self.endpoint.connect(&spec, CONNECT_DEADLINE).map_err(Stopped::Broken)?);
        self.gap.on_connected(Instant::now());
        self.session.connected();
        tracing::info!(
            generation = membership.generation.0,
            world_size = membership.members.len(),
            rank = self.session.place().map_or(0, |(_, rank)| rank),
            "ring built"
        );
        Ok(())
    }

    /// Begins to serve newcomers that have come to the door, if this worker has a state that counts.
    fn receive_visitors(&mut self) {
        if self.session.is_over() {
            return self.donor.dismiss();
        }
        let (Some(generation), Some(state)) = (self.session.in_round(), self.session.state()) else { return };
        while let Some(visitor) = self.endpoint.visitor() {
            let Tensors { parameters, slots, .. } = &self.tensors;
            self.donor.serve(visitor, generation, &state.record(), parameters, slots);
        }
    }

    /// Takes the next parcel from the member that gives this newcomer the state. A donor that does not do what it should
    /// is no failure: there are others.
    fn fetch(&mut self, donor: WorkerId, address: SocketAddr) -> Result<(), Stopped> {
        match self.fetch_next(donor, address) {
            Ok(()) => Ok(()),
            Err(FetchError::Donor(error)) => {
                tracing::info!(%donor, error, "no state from this member");
                self.source = None;
                self.session.fetch_broke();
                // What the master says meanwhile may be what the next attempt needs.
                if let Ok(message) = self.inbox.recv_timeout(FETCH_PAUSE) {
                    self.handle(message);
                }
                Ok(())
            }
            Err(FetchError::Stopped(stopped)) => Err(stopped),
        }
    }

    fn fetch_next(&mut self, donor: WorkerId, address: SocketAddr) -> Result<(), FetchError> {
        let Self { endpoint, source, tensors, session, .. } = self;
        let source = match source.take_if(|source| source.donor() == donor.0) {
            Some(link) => source.insert(link),
            None => {
                let member = Member { id: donor.0, address };
                let link = endpoint.fetch(member, self.patience, self.patience);
                source.insert(link.map_err(|error| FetchError::Donor(error.to_string()))?)
            }
        };
        let broke = |error: std::io::Error| FetchError::Donor(error.to_string());
        let nonsense = |what: &str| FetchError::Donor(format!("it sent {what}"));
        let Some(head) = source.next(FETCH_WAIT).map_err(broke)? else { return Ok(()) };
        let generation = Generation(head.generation);
        let (parameters, slots) = (tensors.parameters.len() as u64, tensors.slots.len() as u64);
        match (head.kind, head.floats) {
            (KIND_STATE, floats) if floats == parameters + slots => {
                let StateNote { record, digest } =
                    header::decode(&head.note).ok_or_else(|| nonsense("a state that can't be read"))?;
                source.take(writable(&mut tensors.parameters)).map_err(broke)?;
                source.take(writable(&mut tensors.slots)).map_err(broke)?;
                if digest != donor::digest(&tensors.parameters, &tensors.slots) {
                    return Err(nonsense("a state that came out different"));
                }
                if !session.install(record, None) {
                    return Err(nonsense("a ledger that can't be true"));
                }
                session.fetched(generation);
            }
            (KIND_RESULT, floats) if floats == parameters && session.state().is_some() => {
                let headers: Vec<StepHeader> =
                    header::decode(&head.note).ok_or_else(|| nonsense("headers that can't be read"))?;
                if headers.iter().any(|header| header.step != session.step()) {
                    return Err(nonsense("another step's result"));
                }
                source.take(&mut tensors.reduced).map_err(broke)?;
                self.update(headers).map_err(FetchError::Stopped)?;
                self.session.fetched(generation);
            }
            (KIND_TIP, 0) => session.caught_up(),
            (KIND_END, 0) => session.fetch_ended(generation),
            (kind, floats) => {
                return Err(nonsense(&format!("a parcel of kind {kind} with {floats} floats")));
            }
        }
        Ok(())
    }

    fn synchronize(&mut self) -> Result<(), Stopped> {
        let digest = self.session.state().map_or(0, |state| self.tensors.quick_digest(state));
        let mine = header::encode(&self.session.sync_header(digest));
        let ring = ring(&mut self.ring)?;
        let headers = decode_all(ring.all_gather(&mine).map_err(Stopped::Broken)?)?;
        self.session.synced(&headers).map_err(|misfit| Stopped::Failed(misfit_failure(&misfit)))
    }

    fn repair(&mut self, plan: &Repair) -> Result<(), Stopped> {
        let rank = self.rank();
        if plan.step.is_none() && rank == 0 {
            self.begin()?;
        }
        let mut result = None;
        if let Some((donor, behind)) = &plan.result {
            result = self.repair_by_result(*donor, behind.contains(&rank))?;
        }
        if let Some((donor, takers)) = &plan.state {
            self.repair_by_state(*donor, takers.contains(&rank), result)?;
        }
        self.session.repaired();
        self.checkpoints.prepare(ring(&mut self.ring)?.world_size());
        self.gradient_is_pending &= !self.session.pending_ranges().is_empty();
        self.gap.on_repaired(Instant::now());
        tracing::info!(step = self.session.step(), "all ranks at one state");
        Ok(())
    }

    /// The donor passes its last step's headers and reduced gradient around; ranks behind apply them. Gives the headers
    /// to a rank that has passed them on, and now has the reduced gradient in `reduced`.
    fn repair_by_result(&mut self, donor: usize, apply: bool) -> Result<Option<Vec<StepHeader>>, Stopped> {
        let ring = ring(&mut self.ring)?;
        let donates = ring.rank() == donor;
        let mut bytes = match (donates, self.session.kept()) {
            (true, Some(headers)) => header::encode(&headers.to_vec()),
            _ => Vec::new(),
        };
        ring.broadcast_bytes(donor, &mut bytes).map_err(Stopped::Broken)?;
        let tensors = &mut self.tensors;
        let sum = if donates { writable(&mut tensors.kept) } else { &mut tensors.reduced };
        ring.broadcast(donor, sum).map_err(Stopped::Broken)?;
        if donates {
            return Ok(None);
        }
        let headers: Vec<StepHeader> = header::decode(&bytes).ok_or_else(|| garbled("a step's headers"))?;
        if !apply {
            return Ok(Some(headers));
        }
        self.update(headers)?;
        Ok(None)
    }

    /// The donor passes its state around; ranks without one take it. The others hold the same bits. `result`: headers of
    /// the last step, where its reduced gradient has passed through this rank.
    fn repair_by_state(
        &mut self,
        donor: usize,
        take: bool,
        result: Option<Vec<StepHeader>>,
    ) -> Result<(), Stopped> {
        let ring = ring(&mut self.ring)?;
        let mut bytes = match (ring.rank() == donor, self.session.state()) {
            (true, Some(state)) => header::encode(&state.record()),
            _ => Vec::new(),
        };
        ring.broadcast_bytes(donor, &mut bytes).map_err(Stopped::Broken)?;
        ring.broadcast(donor, writable(&mut self.tensors.parameters)).map_err(Stopped::Broken)?;
        ring.broadcast(donor, writable(&mut self.tensors.slots)).map_err(Stopped::Broken)?;
        if take {
            let record: StateRecord = header::decode(&bytes).ok_or_else(|| garbled("a state"))?;
            // Whoever dies next, a rank that is still behind can be repaired from here too.
            if result.is_some() {
                self.tensors.keep_reduced();
            }
            if !self.session.install(record, result) {
                return Err(garbled("a ledger"));
            }
        }
        Ok(())
    }

    fn compute(&mut self, ranges: &[RecordRange]) -> Result<(), Failure> {
        if !self.gradient_is_pending {
            self.tensors.gradient.fill(0.0);
            self.gradient_is_pending = true;
        }
        let fail = |error| Failure { error, ranges: ranges.to_vec(), fatal: false };
        let most = self.model.micro_batch().unwrap_or(usize::MAX).max(1);
        let (mut loss_sum, mut busy) = (0.0, Duration::ZERO);
        let mut records = Vec::new();
        for (i, range) in ranges.iter().enumerate() {
            records.extend(self.prefetch.take(*range).map_err(|(range, error)| Failure {
                error,
                ranges: vec![range],
                fatal: false,
            })?);
            while records.len() >= most || (i + 1 == ranges.len() && !records.is_empty()) {
                let rest = records.split_off(records.len().min(most));
                let batch = std::mem::replace(&mut records, rest);
                let started = Instant::now();
                loss_sum += self.gradients(batch).map_err(fail)?;
                busy += started.elapsed();
            }
        }
        self.session.computed(loss_sum, busy.as_micros() as u64);
        Ok(())
    }

    fn gradients(&mut self, records: Vec<<M::Reader as Reader>::Record>) -> Result<f64, String> {
        let (model, tensors) = (&mut self.model, &mut self.tensors);
        let batch = call_user("feed()", || model.feed(records))?;
        let (parameters, gradient) = (tensors.parameters.as_slice(), &mut tensors.gradient);
        let loss = call_user("gradients()", || model.gradients(parameters, batch, gradient))?;
        match loss.is_finite() {
            true => Ok(loss),
            false => Err(format!("gradients() gave a loss of {loss}")),
        }
    }

    fn step(&mut self) -> Result<(), Stopped> {
        let mine = header::encode(&self.session.header(self.tensors.window_digest(self.session.step())));
        if !self.gradient_is_pending {
            self.tensors.gradient.fill(0.0);
        }
        let ring = ring(&mut self.ring)?;
        let started = Instant::now();
        let headers = if ring.world_size() == 1 {
            // Nobody else needs this rank's gradient again, so it can be the sum without a copy.
            std::mem::swap(&mut self.tensors.gradient, &mut self.tensors.reduced);
            vec![mine]
        } else {
            let tensors = &mut self.tensors;
            ring.all_reduce(&mine, &tensors.gradient, &mut tensors.reduced).map_err(Stopped::Broken)?
        };
        self.session.reduced(started.elapsed());
        let headers: Vec<StepHeader> = decode_all(headers)?;
        self.session.check(&headers).map_err(|m| Stopped::Failed(mismatch(&m)))?;
        // The commit may end this group.
        let place = self.session.place();
        self.update(headers)?;
        self.gradient_is_pending = false;
        if let Some((generation, _)) = place
            && let Some(phases) = self.gap.on_commit(generation, Instant::now())
        {
            let step = self.session.step();
            self.outbox.send(ToMaster::Resumed { generation, step, phases });
        }
        Ok(())
    }

    /// Applies a step's reduced gradient, which is in `reduced`, and takes the step's records into the ledger.
    fn update(&mut self, headers: Vec<StepHeader>) -> Result<(), Stopped> {
        let records: u64 = headers.iter().map(StepHeader::records).sum();
        let (model, tensors, step) = (&mut self.model, &mut self.tensors, self.session.step());
        if records > 0 {
            call_user("update()", || {
                model.update(Update {
                    step,
                    records,
                    sum: &tensors.reduced,
                    parameters: writable(&mut tensors.parameters),
                    slots: writable(&mut tensors.slots),
                })
            })
            .map_err(|error| Stopped::Failed(Failure { error, ranges: Vec::new(), fatal: false }))?;
        }
        tensors.keep_reduced();
        if let Some((generation, _)) = self.session.place() {
            self.donor.committed(generation, &headers, &self.tensors.kept);
        }
        self.session.commit(headers, self.started.elapsed());
        Ok(())
    }

    fn talk(&mut self) -> Result<(), Stopped> {
        tracing::debug!(step = self.session.step(), "waiting for records");
        // The group waits for records: give them a moment to come, rather than talking without end.
        if self.talked {
            match self.inbox.recv_timeout(TALK_PAUSE) {
                Ok(message) => {
                    self.handle(message);
                    if self.session.poll() != Task::Talk {
                        return Ok(());
                    }
                }
                Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => {}
            }
        }
        let mine = header::encode(&self.session.header(self.tensors.window_digest(self.session.step())));
        let ring = ring(&mut self.ring)?;
        let headers: Vec<StepHeader> = decode_all(ring.all_gather(&mine).map_err(Stopped::Broken)?)?;
        self.session.talked(&headers).map_err(|m| Stopped::Failed(mismatch(&m)))
    }

    fn finish(&mut self) -> Result<(), Failure> {
        let Some((generation, rank)) = self.session.place() else { return Ok(()) };
        let Some(state) = self.session.state() else { return Ok(()) };
        // Before the word that ends the job: who has not said it is replaced, and the next lowest rank exports.
        if let (0, Some(Export { address, layout })) = (rank, &self.export) {
            weights::save(address, layout, &self.tensors.parameters)
                .map_err(|error| Failure::fatal(format!("the model was not exported: {error}")))?;
            tracing::info!(address, step = state.step, "the model is exported");
        }
        let (model, parameters) = (&mut self.model, self.tensors.parameters.as_slice());
        let summary = match rank {
            0 => call_user("summary()", || model.summary(parameters)).unwrap_or_else(Some),
            _ => None,
        };
        self.outbox.send(ToMaster::Finished(Finished {
            generation,
            step: state.step,
            digest: self.tensors.digest(state),
            ledger: state.ledger.clone(),
            records_trained: state.records_trained,
            stopped_early: self.session.stops_early(),
            summary,
        }));
        self.session.told();
        Ok(())
    }

    fn on_broken(&mut self, error: &CollectiveError) {
        self.gap.on_trouble(Instant::now());
        self.ring = None;
        self.gap.on_stopped(Instant::now());
        tracing::info!(%error, "links broke");
        match error {
            CollectiveError::Unreachable { member, .. } => {
                self.session.unanswered(WorkerId(*member), error.to_string());
            }
            _ => self.session.broken(error.member().map(WorkerId), error.to_string()),
        }
    }

    fn send_reports(&mut self) {
        while let Some(report) = self.session.poll_report() {
            self.outbox.send(ToMaster::Report(report));
        }
    }

    fn rank(&self) -> usize {
        self.session.place().map_or(0, |(_, rank)| rank)
    }
}

fn ring(ring: &mut Option<TcpRing>) -> Result<&mut TcpRing, Stopped> {
    ring.as_mut().ok_or(Stopped::Broken(CollectiveError::Aborted { generation: 0 }))
}

fn decode_all<T: serde::de::DeserializeOwned>(headers: Vec<Vec<u8>>) -> Result<Vec<T>, Stopped> {
    headers.iter().map(|bytes| header::decode(bytes).ok_or_else(|| garbled("a header"))).collect()
}

/// What came over a link that proved the job's token makes no sense: other ranks run another program.
fn garbled(what: &str) -> Stopped {
    let error = format!("a peer sent {what} that can't be read; do all workers run the same program?");
    Stopped::Failed(Failure { error, ranges: Vec::new(), fatal: false })
}

fn misfit_failure(misfit: &Misfit) -> Failure {
    match misfit {
        Misfit::Differs(differing) => mismatch(differing),
        Misfit::Elsewhere(Elsewhere { first_has_gpu }) => {
            let (here, there) = if *first_has_gpu { ("the CPU", "a GPU") } else { ("a GPU", "the CPU") };
            let error = format!(
                "this worker computes on {here} and the group on {there}; all must compute on the same kind of device"
            );
            Failure { error, ranges: Vec::new(), fatal: false }
        }
    }
}

fn mismatch(mismatch: &Mismatch) -> Failure {
    let Mismatch { step, ranks, from } = mismatch;
    Failure::fatal(format!(
        "replicas differ at step {step}: ranks {ranks:?} do not hold the same state as rank {from}; the model's \
         methods must depend on their arguments alone"
    ))
}

mod checkpoints;
mod evaluation;

pub(crate) use self::checkpoints::Checkpointing;
pub(crate) use self::evaluation::Validation;

/// Links are built by the kernel and the accepting thread, so a peer that is busy computing delays nobody; a peer that
/// finishes its step first does. The master ends the wait for peers that never come.
const CONNECT_DEADLINE: Duration = Duration::from_secs(600);

/// How long a newcomer waits for the donor before it looks into its inbox.
const FETCH_WAIT: Duration = Duration::from_millis(5);

/// How long it waits before it asks the next one.
const FETCH_PAUSE: Duration = Duration::from_millis(50);

/// How long a rank without records waits for some before it tells the others again that it has none.
const TALK_PAUSE: Duration = Duration::from_millis(5);
