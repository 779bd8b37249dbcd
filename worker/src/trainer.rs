//! Executes the tasks of the session: computes gradients, exchanges data with the group, applies
//! updates.
//!
//! One thread with blocking calls. Messages of the master arrive in an inbox and are handled
//! between two tasks. Urgent ones (a lost member) reach a blocked collective call through the
//! group's fence.

use std::mem;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use elasticdl_collective::device::{DeviceGroup, NcclPolicy};
use elasticdl_collective::{
    CollectiveError, Communicator, Endpoint, GroupSpec, Member, StateReceiver,
};
use elasticdl_proto::{
    Generation, MasterMessage, Membership, RecordRange, WorkerId, WorkerMessage,
};

use crate::buckets::Gradients;
use crate::core::halt::{Halt, Reason};
use crate::core::header::{self, StateRecord, StepHeader};
use crate::core::repair::{Repair, StateMismatch};
use crate::core::session::{Exit, GroupMismatch, Session, Task};
use crate::core::transport_switch::DeviceMismatch;
use crate::donor::{Donor, TRANSFER_IDLE_TIMEOUT};
use crate::failure::{Failure, call_user};
use crate::gap::GapTimer;
use crate::messages::{ControlEvent, Outbox};
use crate::model::{Model, NamedTensor};
use crate::prefetch::{Prefetch, ReadError};
use crate::reader::Reader;
use crate::ring::Ring;
use crate::tensors::{HostState, Tensor, Tensors};

/// Training of one worker, from its first membership to its end.
pub(crate) struct Trainer<'a, M: Model> {
    model: M,
    seed: u64,
    session: Session,
    tensors: Tensors,
    /// Whether `gradient` holds the session's pending gradient, and not an older step's.
    gradient_is_pending: bool,
    /// Number of the gradient's buckets that this group has summed during the computation, or the
    /// error that stopped it.
    summed: Result<usize, CollectiveError>,
    prefetch: Prefetch<<M::Reader as Reader>::Record>,
    export: Option<Export>,
    /// Whether a step with a non-finite gradient is skipped and the job continues.
    skips_nonfinite: bool,
    endpoint: Endpoint,
    ring: Option<Ring>,
    /// Whether this worker would use NCCL.
    nccl: NcclPolicy,
    /// The all-reduce transport that was reported to the master last.
    allreduce_transport: Option<(Generation, String)>,
    /// Joining workers that receive the state from this one.
    donor: Donor,
    checkpoints: Checkpointing,
    /// `None` if nothing is evaluated.
    validation: Option<Validation<M::Reader>>,
    /// Link to the donor while this worker is joining.
    source: Option<StateReceiver>,
    /// Parts of the snapshot received so far, over this link and earlier ones.
    incoming: Option<IncomingSnapshot>,
    /// Timeout of the dial of a donor.
    dial_limit: Duration,
    inbox: &'a Receiver<ControlEvent>,
    outbox: Outbox,
    started: Instant,
    gap: GapTimer,
    /// Whether the last task was an idle round, so that this thread pauses before the next one.
    was_idle: bool,
}

/// Parts of a [`Trainer`].
pub(crate) struct TrainerParts<'a, M: Model> {
    pub(crate) model: M,
    pub(crate) seed: u64,
    pub(crate) session: Session,
    pub(crate) tensors: Tensors,
    pub(crate) prefetch: Prefetch<<M::Reader as Reader>::Record>,
    /// `None` if the final model is not exported.
    pub(crate) export: Option<Export>,
    /// Whether steps with non-finite gradients are skipped. Otherwise the first one ends the job.
    pub(crate) skips_nonfinite: bool,
    pub(crate) endpoint: Endpoint,
    /// Timeout of the dial of a donor.
    pub(crate) dial_limit: Duration,
    pub(crate) checkpoints: Checkpointing,
    /// `None` if nothing is evaluated.
    pub(crate) validation: Option<Validation<M::Reader>>,
    pub(crate) inbox: &'a Receiver<ControlEvent>,
    pub(crate) outbox: Outbox,
}

/// Destination of the final model.
#[derive(Debug)]
pub(crate) struct Export {
    pub(crate) address: String,
    pub(crate) layout: Vec<NamedTensor>,
}

/// Why a task was not completed.
#[derive(Debug)]
enum Stopped {
    /// The links broke; a new group will form.
    Broken(CollectiveError),
    /// This worker, or the job, cannot continue.
    Failed(Failure),
}

impl<E: Into<Failure>> From<E> for Stopped {
    fn from(error: E) -> Self {
        Self::Failed(error.into())
    }
}

impl<'a, M: Model> Trainer<'a, M> {
    pub(crate) fn new(parts: TrainerParts<'a, M>) -> Self {
        let TrainerParts {
            model,
            seed,
            session,
            tensors,
            prefetch,
            export,
            skips_nonfinite,
            endpoint,
            dial_limit,
            checkpoints,
            validation,
            inbox,
            outbox,
        } = parts;
        let nccl = match &tensors {
            Tensors::Device(_) => nccl_policy(),
            Tensors::Host(_) => NcclPolicy::Off("it computes on the CPU".into()),
        };
        Self {
            model,
            seed,
            session,
            tensors,
            gradient_is_pending: false,
            summed: Ok(0),
            prefetch,
            export,
            skips_nonfinite,
            endpoint,
            ring: None,
            nccl,
            allreduce_transport: None,
            donor: Donor::new(TRANSFER_IDLE_TIMEOUT),
            checkpoints,
            validation,
            source: None,
            incoming: None,
            dial_limit,
            inbox,
            outbox,
            started: Instant::now(),
            gap: GapTimer::default(),
            was_idle: false,
        }
    }

    /// Trains until the master, the session or a failure ends it.
    pub(crate) fn run(mut self) -> Result<Exit, Failure> {
        loop {
            while let Ok(message) = self.inbox.try_recv() {
                self.handle(message);
            }
            self.accept_state_requests()?;
            let task = self.session.poll();
            let is_idle = task == Task::ExchangeHeaders;
            let done = match task {
                Task::Exit(exit) => return Ok(exit),
                task => self.perform(task),
            };
            self.was_idle = is_idle;
            match done {
                Ok(()) => {}
                Err(Stopped::Broken(error)) => match self.classify(error) {
                    Ok(error) => self.on_broken(&error),
                    Err(failure) => {
                        // Work on the GPU may never complete, and dropping would wait for it.
                        mem::forget(self);
                        return Err(failure);
                    }
                },
                Err(Stopped::Failed(failure)) => return Err(failure),
            }
            self.poll_checkpoint_writer()?;
            self.send_reports();
        }
    }

    fn handle(&mut self, event: ControlEvent) {
        let (message, arrived) = match event {
            ControlEvent::Message(message, arrived) => (message, arrived),
            ControlEvent::Reconnected => return self.reconnected(),
        };
        match message {
            MasterMessage::Drain => self.session.handle_drain(),
            MasterMessage::Fetch(donors) => self.session.handle_fetch(donors),
            MasterMessage::KeepCheckpoint => self.session.handle_checkpoint(),
            MasterMessage::Lease(ranges) => {
                for range in &ranges {
                    self.prefetch.want(*range);
                }
                self.session.handle_lease(ranges);
            }
            MasterMessage::Membership(membership) => {
                if membership.abort {
                    self.gap.on_trouble(arrived);
                }
                self.session.handle_membership(membership);
            }
            MasterMessage::Shutdown(reason) => self.session.handle_shutdown(reason),
            MasterMessage::Suspend => self.session.handle_suspend(),
            // Handled before the training began.
            MasterMessage::Describe | MasterMessage::Prepare(_) => {}
        }
    }

    fn reconnected(&mut self) {
        self.allreduce_transport = None;
        self.session.reconnected();
        self.send_reports();
        if self.session.is_joiner() {
            // The earlier message may not have reached a master.
            let parameters = self.tensors.sizes().0 as u64;
            self.outbox.send(WorkerMessage::Ready { parameters });
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
            Task::ExchangeHeaders => self.exchange_headers(),
            Task::Wait => {
                match self.inbox.recv() {
                    Ok(message) => self.handle(message),
                    Err(_) => {
                        self.session.handle_shutdown("the control stream's thread ended".into())
                    }
                }
                Ok(())
            }
        }
    }

    fn connect(&mut self, membership: &Membership) -> Result<(), Stopped> {
        self.ring = None;
        self.summed = Ok(0);
        self.source = None;
        self.incoming = None;
        self.gap.on_membership(Instant::now());
        let is_member = |id| membership.members.iter().any(|(member, _)| member.0 == id);
        self.donor.switch(membership.generation, is_member);
        let members = membership
            .members
            .iter()
            .map(|(id, address)| Member { id: id.0, address: *address })
            .collect();
        let spec = GroupSpec { generation: membership.generation.0, members };
        let ring = self.endpoint.connect(&spec, CONNECT_DEADLINE).map_err(Stopped::Broken)?;
        self.ring = Some(match &self.tensors {
            Tensors::Device(state) => Ring::Device(DeviceGroup::new(ring, state.device().clone())),
            Tensors::Host(_) => Ring::Host(ring),
        });
        self.gap.on_connected(Instant::now());
        self.session.connected();
        tracing::info!(
            generation = membership.generation.0,
            world_size = membership.members.len(),
            rank = self.session.group_rank().map_or(0, |(_, rank)| rank),
            "ring built"
        );
        Ok(())
    }

    /// Accepts state requests of joining workers, and starts to copy the state for them while this
    /// rank computes or waits for others. The copy is sent when all ranks have reported that they
    /// hold its step.
    fn accept_state_requests(&mut self) -> Result<(), Failure> {
        if self.session.is_finished() {
            self.donor.dismiss();
            return Ok(());
        }
        while let Some(request) = self.endpoint.next_state_request() {
            self.donor.admit(request);
        }
        let (Some(generation), Some(state)) = (self.session.in_round(), self.session.state())
        else {
            return Ok(());
        };
        let (parameters, slots) = self.tensors.sizes();
        if self.donor.wants_snapshot(generation, state.step, parameters + slots) {
            let parameters = self.tensors.to_host(Tensor::Parameters)?;
            let slots = self.tensors.to_host(Tensor::Slots)?;
            self.donor.prepare(generation, state.step, parameters, slots);
        }
        Ok(())
    }

    /// Sends the current state to joining workers: all ranks have reported that they hold its step,
    /// and no update has changed it yet.
    fn serve_state_requests(&mut self) {
        if let (Some(generation), Some(state)) = (self.session.in_round(), self.session.state()) {
            self.donor.release(generation, state.step, || state.record());
        }
    }

    fn synchronize(&mut self) -> Result<(), Stopped> {
        let digest = match self.session.state() {
            Some(state) => self.tensors.quick_digest(state)?,
            None => 0,
        };
        let mine = header::encode(&self.session.sync_header(digest));
        let ring = ring(&mut self.ring)?;
        let headers = decode_all(ring.host_mut().all_gather(&mine).map_err(Stopped::Broken)?)?;
        self.session.synced(&headers).map_err(|mismatch| Stopped::Failed(group_mismatch(&mismatch)))
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
        self.begin_nccl()?;
        self.session.repaired();
        self.checkpoints.prepare(ring(&mut self.ring)?.host().world_size());
        self.gradient_is_pending &= !self.session.pending_ranges().is_empty();
        self.gap.on_repaired(Instant::now());
        tracing::info!(step = self.session.step(), "all ranks at one state");
        Ok(())
    }

    /// The donor broadcasts its last step's headers and reduced gradient; ranks that are behind
    /// apply them. Returns the headers on a rank that only relays them, and that now has the
    /// reduced gradient in `reduced`.
    fn repair_by_result(
        &mut self,
        donor: usize,
        apply: bool,
    ) -> Result<Option<Vec<StepHeader>>, Stopped> {
        let ring = ring(&mut self.ring)?;
        let donates = ring.host().rank() == donor;
        let mut bytes = match (donates, self.session.last_headers()) {
            (true, Some(headers)) => header::encode(&headers.to_vec()),
            _ => Vec::new(),
        };
        ring.host_mut().broadcast_bytes(donor, &mut bytes).map_err(Stopped::Broken)?;
        let sum = if donates { Tensor::Retained } else { Tensor::Reduced };
        self.tensors.broadcast(ring, donor, sum).map_err(Stopped::Broken)?;
        if donates {
            return Ok(None);
        }
        let headers: Vec<StepHeader> =
            header::decode(&bytes).ok_or_else(|| garbled("a step's headers"))?;
        if !apply {
            return Ok(Some(headers));
        }
        let is_finite = self.is_finite(&headers)?;
        self.update(headers, is_finite)?;
        Ok(None)
    }

    /// The donor broadcasts its state; ranks without one install it, the others hold the same bits.
    /// `result`: headers of the last step, if its reduced gradient has been relayed by this rank.
    fn repair_by_state(
        &mut self,
        donor: usize,
        take: bool,
        result: Option<Vec<StepHeader>>,
    ) -> Result<(), Stopped> {
        let ring = ring(&mut self.ring)?;
        let mut bytes = match (ring.host().rank() == donor, self.session.state()) {
            (true, Some(state)) => header::encode(&state.record()),
            _ => Vec::new(),
        };
        ring.host_mut().broadcast_bytes(donor, &mut bytes).map_err(Stopped::Broken)?;
        for tensor in [Tensor::Parameters, Tensor::Slots] {
            self.tensors.broadcast(ring, donor, tensor).map_err(Stopped::Broken)?;
        }
        if take {
            let record: StateRecord = header::decode(&bytes).ok_or_else(|| garbled("a state"))?;
            // So this rank, too, can repair a rank that is still behind if the donor is lost next.
            if result.is_some() {
                self.tensors.retain_reduced();
            }
            if !self.session.install(record, result) {
                return Err(garbled("a ledger"));
            }
        }
        Ok(())
    }

    fn compute(&mut self, ranges: &[RecordRange]) -> Result<(), Failure> {
        if !self.gradient_is_pending {
            self.tensors.clear_gradient()?;
            self.gradient_is_pending = true;
        }
        let fail = |error| Failure { error, ranges: ranges.to_vec(), fatal: false };
        let most = self.model.max_micro_batch().unwrap_or(usize::MAX).max(1);
        let (mut loss_sum, mut busy) = (0.0, Duration::ZERO);
        let mut records = Vec::new();
        let mut unread = Vec::new();
        for (i, range) in ranges.iter().enumerate() {
            let taken = match self.prefetch.take(*range) {
                Ok(taken) => taken,
                Err((range, ReadError { text, ends_job: true })) => {
                    self.session.halt(Halt { reason: Reason::Error(text), ranges: vec![range] });
                    return Ok(());
                }
                Err(not_read) => return Err(not_read.into()),
            };
            records.extend(taken.records);
            if let Some(rest) = taken.rest {
                // Storage does not answer: the step consists of the records that have been read.
                unread.push(rest);
                unread.extend(&ranges[i + 1..]);
            }
            let ends = i + 1 == ranges.len() || !unread.is_empty();
            while records.len() >= most || (ends && !records.is_empty()) {
                let rest = records.split_off(records.len().min(most));
                let batch = mem::replace(&mut records, rest);
                let started = Instant::now();
                let is_last = ends && records.is_empty();
                let (loss, took) = match is_last.then(|| self.model.bucket_len()).flatten() {
                    Some(bucket) => self.last_gradients(batch, bucket).map_err(fail)?,
                    None => (self.gradients(batch).map_err(fail)?, started.elapsed()),
                };
                loss_sum += loss;
                busy += took;
            }
            if !unread.is_empty() {
                break;
            }
        }
        self.session.computed(loss_sum, busy.as_micros() as u64);
        self.session.not_read(&unread);
        Ok(())
    }

    /// Header of this rank for the round.
    fn header(&mut self) -> Result<Vec<u8>, Failure> {
        match self.prefetch.readable(self.session.held()) {
            Ok(readable) => self.session.limit_held(readable),
            Err((range, ReadError { text, ends_job: true })) => {
                self.session.halt(Halt { reason: Reason::Error(text), ranges: vec![range] });
            }
            Err(not_read) => return Err(not_read.into()),
        }
        let digest = self.tensors.window_digest(self.session.step())?;
        Ok(header::encode(&self.session.header(digest)))
    }

    fn gradients(&mut self, records: Vec<<M::Reader as Reader>::Record>) -> Result<f64, String> {
        let (model, tensors, count) = (&mut self.model, &mut self.tensors, records.len());
        let batch = call_user("feed()", || model.feed(records))?;
        // All ranks see a non-finite loss in this rank's header.
        let loss = call_user("gradients()", || match tensors {
            Tensors::Device(state) => {
                let (parameters, mut gradient) = state.gradient(count);
                device_of(model)?.gradients(parameters, batch, &mut gradient)
            }
            Tensors::Host(HostState { parameters, gradient, .. }) => {
                model.gradients(parameters, batch, &mut Gradients::new(gradient, count))
            }
        })?;
        Ok(loss.sum_over(count))
    }

    fn step(&mut self) -> Result<(), Stopped> {
        let path = self.path();
        let mine = self.header()?;
        if !self.gradient_is_pending {
            self.tensors.clear_gradient()?;
        }
        let ring = ring(&mut self.ring)?;
        let started = Instant::now();
        let summed = mem::replace(&mut self.summed, Ok(0)).map_err(Stopped::Broken)?;
        let buckets = self.model.bucket_len().map(|bucket| (bucket, summed));
        let headers = self.tensors.sum(ring, &mine, path, buckets).map_err(Stopped::Broken)?;
        self.session.reduced(started.elapsed());
        self.report_transport(path);
        let headers: Vec<StepHeader> = decode_all(headers)?;
        self.session.check(&headers).map_err(|m| Stopped::Failed(state_mismatch(&m)))?;
        let is_finite = self.is_finite(&headers)?;
        if Session::is_withheld(&headers) || !(is_finite || self.skips_nonfinite) {
            return self.withhold(&headers);
        }
        self.serve_state_requests();
        if headers.iter().all(|header| header.records() == 0) {
            // No rank could read a record: there is no step to make yet.
            return self
                .session
                .headers_exchanged(&headers)
                .map_err(|m| Stopped::Failed(state_mismatch(&m)));
        }
        // The commit may end this group.
        let group_rank = self.session.group_rank();
        self.update(headers, is_finite)?;
        self.gradient_is_pending = false;
        if let Some((generation, _)) = group_rank
            && let Some(phases) = self.gap.on_commit(generation, Instant::now())
        {
            let step = self.session.step();
            self.outbox.send(WorkerMessage::Resumed { generation, step, phases });
        }
        Ok(())
    }

    /// Applies a step's reduced gradient, which is in `reduced`, and commits the step's records to
    /// the ledger. A gradient that is not [finite](Self::is_finite) is not applied.
    fn update(&mut self, headers: Vec<StepHeader>, is_finite: bool) -> Result<(), Stopped> {
        let records: u64 = headers.iter().map(StepHeader::records).sum();
        let (model, tensors, step) = (&mut self.model, &mut self.tensors, self.session.step());
        if records > 0 && is_finite {
            call_user("update()", || match tensors {
                Tensors::Device(state) => {
                    let optimizer = model.optimizer();
                    device_of(model)?.update(state.update(step, records), &optimizer)
                }
                Tensors::Host(state) => model.update(state.update(step, records)),
            })
            .map_err(|error| {
                Stopped::Failed(Failure { error, ranges: Vec::new(), fatal: false })
            })?;
        }
        tensors.retain_reduced();
        if let (Some((generation, _)), true) = (self.session.group_rank(), self.donor.is_serving())
        {
            self.donor.committed(
                generation,
                step,
                &headers,
                &self.tensors.to_host(Tensor::Retained)?,
            );
        }
        if is_finite {
            self.session.commit(headers, self.started.elapsed());
        } else {
            tracing::warn!(step = step + 1, "the gradient is not finite; the step is skipped");
            self.session.commit_skipped(headers, self.started.elapsed());
        }
        Ok(())
    }

    fn exchange_headers(&mut self) -> Result<(), Stopped> {
        tracing::debug!(step = self.session.step(), "waiting for records");
        // The group waits for records. A pause gives them time to arrive and limits the rate of
        // idle rounds.
        if self.was_idle {
            match self.inbox.recv_timeout(IDLE_PAUSE) {
                Ok(message) => {
                    self.handle(message);
                    if self.session.poll() != Task::ExchangeHeaders {
                        return Ok(());
                    }
                }
                Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => {}
            }
        }
        self.path();
        let mine = self.header()?;
        let ring = ring(&mut self.ring)?;
        let headers: Vec<StepHeader> =
            decode_all(ring.host_mut().all_gather(&mine).map_err(Stopped::Broken)?)?;
        self.session.check(&headers).map_err(|m| Stopped::Failed(state_mismatch(&m)))?;
        self.serve_state_requests();
        self.session.headers_exchanged(&headers).map_err(|m| Stopped::Failed(state_mismatch(&m)))
    }

    fn on_broken(&mut self, error: &CollectiveError) {
        self.gap.on_trouble(Instant::now());
        self.ring = None;
        self.gap.on_stopped(Instant::now());
        tracing::info!(%error, "links broke");
        match error {
            CollectiveError::Unreachable { member, .. } => {
                self.session.unreachable_peer(WorkerId(*member), error.to_string());
            }
            _ => self.session.broken(error.member().map(WorkerId), error.to_string()),
        }
    }

    fn send_reports(&mut self) {
        while let Some(report) = self.session.poll_report() {
            self.outbox.send(report);
        }
    }

    fn rank(&self) -> usize {
        self.session.group_rank().map_or(0, |(_, rank)| rank)
    }
}

fn ring(ring: &mut Option<Ring>) -> Result<&mut Ring, Stopped> {
    ring.as_mut().ok_or(Stopped::Broken(CollectiveError::Aborted { generation: 0 }))
}

fn decode_all<T: serde::de::DeserializeOwned>(headers: Vec<Vec<u8>>) -> Result<Vec<T>, Stopped> {
    headers.iter().map(|bytes| header::decode(bytes).ok_or_else(|| garbled("a header"))).collect()
}

/// A peer that has the job's token sent invalid data: the ranks run different programs.
fn garbled(what: &str) -> Stopped {
    let error =
        format!("a peer sent {what} that can't be read; do all workers run the same program?");
    Stopped::Failed(Failure { error, ranges: Vec::new(), fatal: false })
}

fn group_mismatch(mismatch: &GroupMismatch) -> Failure {
    match mismatch {
        GroupMismatch::State(differing) => state_mismatch(differing),
        GroupMismatch::Device(DeviceMismatch { first_has_gpu }) => {
            let (here, there) =
                if *first_has_gpu { ("the CPU", "a GPU") } else { ("a GPU", "the CPU") };
            let error = format!(
                "this worker computes on {here} and the group on {there}; \
                 all must compute on the same kind of device"
            );
            Failure { error, ranges: Vec::new(), fatal: false }
        }
    }
}

fn state_mismatch(mismatch: &StateMismatch) -> Failure {
    let StateMismatch { step, ranks, from } = mismatch;
    Failure::fatal(format!(
        "replicas differ at step {step}: ranks {ranks:?} do not hold the same state as rank \
         {from}; the model's methods must depend on their arguments alone"
    ))
}

mod checkpoints;
mod evaluation;
mod fetch;
mod finish;
mod gpu;
mod incoming;
mod overlap;

pub(crate) use self::checkpoints::Checkpointing;
pub(crate) use self::evaluation::Validation;
use self::gpu::{device_of, nccl_policy};
use self::incoming::IncomingSnapshot;

/// The kernel and the acceptor thread build links, so a peer that is busy computing delays no rank;
/// a peer that has not finished its step does. The master ends the wait for peers that never come.
const CONNECT_DEADLINE: Duration = Duration::from_secs(600);

/// Time that a rank without records waits for some before it starts the next idle round.
const IDLE_PAUSE: Duration = Duration::from_millis(5);
