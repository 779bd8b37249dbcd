//! Executes the tasks of the session: computes gradients, exchanges data with the group, applies
//! updates.
//!
//! One thread with blocking calls. Messages of the master arrive in an inbox and are handled
//! between two tasks; urgent ones reach a blocked collective call through the group's fence.

use std::mem;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use elasticdl_collective::{CollectiveError, GroupSpec, Member};
use elasticdl_data::Reader;
use elasticdl_data::worker::wait_for_access;
use elasticdl_proto::{Generation, MasterMessage, Membership, Order, WorkerId, WorkerMessage};

use crate::buckets::SummedBuckets;
use crate::digests::progress_digest;
use crate::donor::{Donor, StateNote};
use crate::exact_sum::ExactSum;
use crate::exports::Exports;
use crate::external::{Progress, WEIGHT, observe};
use crate::failure::{Failure, call_user};
use crate::gap::GapTimer;
use crate::machine::{self, Links, Machine, Records, receive};
use crate::messages::{ControlEvent, Outbox};
use crate::model::Model;
use crate::session::header::{self, StepHeader, SyncHeader};
use crate::session::{Broadcast, Exit, Session, Task};
use crate::tensor::Tensor;
use crate::tensors::Tensors;
use crate::update::UpdateRule;

/// Training of one worker, from its first membership to its end.
pub(crate) struct Trainer<'a, M: Model> {
    /// Dropped before the model, whose memory it may use.
    pub(crate) tensors: Tensors,
    pub(crate) model: M,
    pub(crate) rule: Box<dyn UpdateRule>,
    pub(crate) seed: u64,
    pub(crate) session: Session,
    /// `None` if sums may depend on the ranks.
    pub(crate) exact: Option<ExactSum>,
    /// Gradient of records that are computed again; empty before the first ones.
    pub(crate) audited: Vec<f32>,
    /// Number of the gradient's buckets that this group has summed during the computation, or the
    /// error that stopped it.
    pub(crate) summed: Result<usize, CollectiveError>,
    /// The order that the positions of gradients and the ledger refer to.
    pub(crate) order: Arc<Order>,
    pub(crate) records: Box<dyn Records<<M::Reader as Reader>::Record>>,
    pub(crate) exports: Exports,
    pub(crate) links: Box<dyn Links>,
    /// The all-reduce transport that was reported to the master last.
    pub(crate) allreduce_transport: Option<(Generation, String)>,
    /// Joining workers that receive the state from this one.
    pub(crate) donor: Donor,
    pub(crate) checkpoints: Checkpointing,
    /// `None` if nothing is evaluated.
    pub(crate) validation: Option<Validation<M::Reader>>,
    /// `None` if the model has no tables.
    pub(crate) tables: Option<RowTables>,
    /// The records of the next step, with tables, if they were fed early.
    pub(crate) fed: Option<fed::FedStep<M::Batch>>,
    /// `None` if each rank holds all of the optimizer's state.
    pub(crate) sharded: Option<ShardedOptimizer>,
    /// Whether the memory of the state had another one than the initial one of this process.
    pub(crate) is_used: bool,
    /// Link to the donor while this worker is joining.
    pub(crate) source: Option<Box<dyn machine::Receiver>>,
    /// Parts of the snapshot received so far, over this link and earlier ones.
    pub(crate) incoming: Option<IncomingSnapshot>,
    /// Timeout of the dial of a donor.
    pub(crate) dial_limit: Duration,
    pub(crate) inbox: &'a Receiver<ControlEvent>,
    pub(crate) outbox: Outbox,
    pub(crate) machine: Arc<dyn Machine>,
    pub(crate) started: Instant,
    pub(crate) gap: GapTimer,
}

impl<M: Model> Trainer<'_, M> {
    /// Trains until the master, the session or a failure ends it.
    pub(crate) fn run(mut self) -> Result<Exit, Failure> {
        loop {
            match self.turn() {
                Ok(None) => {}
                Ok(Some(exit)) => return Ok(exit),
                Err(Failed { mut failure, is_in_use }) => {
                    let bridge = self.model.as_bridge();
                    failure.fatal |= bridge.is_some_and(|bridge| bridge.is_refused());
                    if is_in_use {
                        // Work on the GPU may never complete, and dropping would wait for it.
                        mem::forget(self);
                    }
                    return Err(failure);
                }
            }
        }
    }

    /// Handles the messages that have arrived, and performs the next task. Returns why training has
    /// ended, if it has.
    pub(crate) fn turn(&mut self) -> Result<Option<Exit>, Failed> {
        while let Ok(message) = self.inbox.try_recv() {
            self.handle(message);
        }
        self.send_reports();
        self.serve_state_requests()?;
        let task = self.session.poll();
        self.look_ahead(&task);
        self.outbox.activity.begin(task.activity(), self.session.step(), self.machine.now());
        let done = match task {
            Task::Exit(exit) => return Ok(Some(exit)),
            task => self.perform(task),
        };
        match done {
            Ok(()) => {}
            Err(Stopped::Broken(error)) => match self.classify(error) {
                Ok(error) => self.on_broken(&error),
                Err(failure) => return Err(Failed { failure, is_in_use: true }),
            },
            Err(Stopped::Failed(failure)) => return Err(failure.into()),
            Err(Stopped::Left(why)) => self.leave_links(why),
        }
        self.poll_checkpoint_writer()?;
        Ok(None)
    }

    fn handle(&mut self, event: ControlEvent) {
        let (message, arrived) = match event {
            ControlEvent::Message(message, arrived) => (message, arrived),
            ControlEvent::Reconnected => return self.reconnected(),
        };
        match &message {
            MasterMessage::Membership(membership) if membership.abort => {
                self.gap.on_trouble(arrived);
            }
            _ => {}
        }
        self.session.handle(message);
    }

    fn reconnected(&mut self) {
        self.allreduce_transport = None;
        self.session.reconnected();
    }

    fn perform(&mut self, task: Task) -> Result<(), Stopped> {
        match task {
            Task::Audit(ranges) => self.audit(&ranges),
            Task::Broadcast { root, what } => self.broadcast(root, what),
            Task::BuildNccl => self.build_nccl(),
            Task::Compute { ranges, is_first } => {
                self.compare_own();
                let computed = match self.exact {
                    Some(_) => self.compute_micro_batches(&ranges, is_first),
                    None => self.compute(&ranges, is_first),
                };
                computed.or_else(|stopped| self.halt_of_program(stopped))
            }
            Task::Connect(membership) => self.connect(&membership),
            Task::CreateState => self.create_state(),
            Task::EndRepair => self.end_repair(),
            Task::Evaluate(blocks) => self.evaluate(blocks),
            Task::ExchangeHeaders { pauses } => self.exchange_headers(pauses),
            Task::Exit(_) => Ok(()),
            Task::Fetch(donor, address) => self.fetch(donor, address),
            Task::Finish { is_published } => self.finish(is_published),
            Task::HandOver { leaves } => self.hand_over(&leaves),
            Task::InspectGradient => self.inspect_gradient(),
            Task::Recheck(parts) => self.recheck(&parts),
            Task::StandBy => {
                self.stand_by();
                Ok(())
            }
            Task::Step { is_empty } => self.step(is_empty),
            Task::Synchronize => self.synchronize(),
            Task::Update { records, is_applied } => self.update(records, is_applied),
            Task::Wait => {
                self.wait(Duration::MAX);
                Ok(())
            }
        }
    }

    /// Waits for the master to take this worker back or to release it. Others need not wait for it:
    /// neither its former ring nor joining workers that it served.
    fn stand_by(&mut self) {
        self.tensors.set_group(None);
        self.donor.dismiss();
        if !self.wait(STAND_BY_MAX) {
            self.session.leave();
        }
    }

    /// Handles the next message. Returns whether one came in time.
    fn wait(&mut self, most: Duration) -> bool {
        match receive(&*self.machine, self.inbox, most) {
            Ok(message) => self.handle(message),
            Err(RecvTimeoutError::Timeout) => return false,
            Err(RecvTimeoutError::Disconnected) => {
                let reason = "the control stream's thread ended";
                self.session.handle(MasterMessage::release(reason));
            }
        }
        true
    }

    fn connect(&mut self, membership: &Membership) -> Result<(), Stopped> {
        self.tensors.set_group(None);
        self.summed = Ok(0);
        self.source = None;
        self.incoming = None;
        self.gap.on_membership(self.machine.now());
        let is_member = |id| membership.members.iter().any(|(member, _)| member.0 == id);
        self.donor.switch(membership.generation, is_member);
        let members = membership
            .members
            .iter()
            .map(|(id, address)| Member { id: id.0, address: *address })
            .collect();
        let spec = GroupSpec { generation: membership.generation.0, members };
        self.tensors.set_group(Some(self.links.connect(&spec, CONNECT_DEADLINE)?));
        self.gap.on_connected(self.machine.now());
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
    fn serve_state_requests(&mut self) -> Result<(), Failure> {
        if self.session.is_finished() {
            self.donor.dismiss();
            return Ok(());
        }
        while let Some(request) = self.links.next_request() {
            self.donor.admit(request);
        }
        let (Some(generation), Some(state)) = (self.session.in_round(), self.session.state())
        else {
            return Ok(());
        };
        let tensors = &self.tensors;
        if self.donor.wants_snapshot(generation, state.step, tensors.size()) {
            let copying = |memory| tensors.copy_state_to(memory);
            self.donor.prepare(generation, state.step, copying)?;
        }
        if let Some((generation, state)) = self.session.confirmed() {
            self.donor.release(generation, state.step, || StateNote {
                program: self.session.program().clone(),
                record: state.record(),
                from: 0,
            });
        }
        Ok(())
    }

    fn synchronize(&mut self) -> Result<(), Stopped> {
        let digest = match (self.session.state(), &self.sharded) {
            (Some(state), None) => self.tensors.quick_digest(state)?,
            // The parameters may be those of two steps. All are gathered when the group has formed.
            (Some(state), Some(_)) => progress_digest(state),
            (None, _) => 0,
        };
        let mut mine = self.session.sync_header(digest);
        let step = self.session.state().map(|state| state.step);
        mine.is_gathered = self.sharded.as_ref().is_some_and(ShardedOptimizer::is_gathered);
        mine.owned = match &self.sharded {
            Some(sharded) => sharded.header(),
            None => self.tables.as_ref().and_then(|tables| tables.header(step)),
        };
        let mine = header::encode(&mine);
        let headers: Vec<SyncHeader> = decode_all(self.tensors.group_mut()?.all_gather(&mine)?)?;
        if let Some(tables) = &mut self.tables {
            tables.peers.synced(&headers);
        }
        if let Some(sharded) = &mut self.sharded {
            sharded.peers.synced(&headers);
        }
        self.session.synced(&headers).map_err(|mismatch| group_mismatch(&mismatch))
    }

    fn broadcast(&mut self, root: usize, what: Broadcast) -> Result<(), Stopped> {
        let group = self.tensors.group_mut()?;
        let is_root = group.rank() == root;
        match what {
            Broadcast::ResultHeaders | Broadcast::StateRecord => {
                let mut bytes =
                    if is_root { self.session.broadcast_bytes(what) } else { Vec::new() };
                group.broadcast_bytes(root, &mut bytes)?;
                self.session.bytes_broadcast(&bytes)?;
            }
            // The ranks that are behind have staged the sums, or hold no chunks.
            Broadcast::Result { .. } if self.sharded.is_some() => {
                self.session.tensors_broadcast(true)?;
            }
            Broadcast::Result { is_kept } => {
                let sum = if is_root { Tensor::Retained } else { Tensor::Reduced };
                self.tensors.broadcast(root, sum)?;
                let is_finite = is_root || self.tensors.sum_is_finite()?;
                if is_kept {
                    self.tensors.retain_reduced(false)?;
                }
                self.session.tensors_broadcast(is_finite)?;
            }
            Broadcast::State => {
                self.is_used = true;
                // Those of a state that is older are gathered at the end of the repair.
                if self.sharded.is_none() || self.session.receives_created() {
                    self.tensors.broadcast(root, Tensor::Parameters)?;
                }
                let is_new = !is_root && self.session.state().is_none();
                self.broadcast_slots(root, is_root || is_new)?;
                if let Some(sharded) = self.sharded.as_mut().filter(|_| !is_root) {
                    sharded.receive_state(is_new);
                }
                self.session.tensors_broadcast(true)?;
            }
        }
        Ok(())
    }

    fn end_repair(&mut self) -> Result<(), Stopped> {
        if let Some(tables) = &mut self.tables {
            let members = self.session.members();
            let (step, store) = (self.session.step(), &mut *self.checkpoints.store);
            let regrouped = tables.regroup(self.tensors.group_mut()?, step, members, store)?;
            match regrouped {
                Regrouped::Agreed => {}
                Regrouped::Lost(loss) if !self.session.follows_loss() => {
                    // Those that left the group at its end may have them, and come back.
                    let shards = loss.shards();
                    return Err(Stopped::Left(format!("{shards} shards of tables are not here")));
                }
                Regrouped::Lost(loss) => {
                    if !self.lose_rows(*loss)? {
                        return Ok(());
                    }
                }
                Regrouped::Unreadable => {
                    self.go_back(None);
                    return Ok(());
                }
            }
        }
        if !self.regroup_chunks()? {
            return Ok(());
        }
        self.checkpoints.store.prepare(self.tensors.group_mut()?.world_size());
        self.session.repaired();
        wait_for_access();
        self.outbox.note_state();
        if self.tables.is_some() {
            // The rows of an earlier best model were lost with their group.
            self.exports.forget_unsaved_best();
        }
        self.export_best(true)?;
        self.gap.on_repaired(self.machine.now());
        if let Some(((generation, rank), group)) =
            self.session.group_rank().zip(self.tensors.group())
        {
            let (generation, world_size) = (generation.0, group.world_size());
            observe(&mut self.model, Progress::Grouped { generation, rank, world_size });
        }
        self.observe_state();
        tracing::info!(step = self.session.step(), "all ranks at one state");
        Ok(())
    }

    /// Lets the model know the state that it continues.
    fn observe_state(&mut self) {
        if let Some(state) = self.session.state() {
            let (epoch, records) = (state.ledger.epoch(), state.records_trained);
            observe(&mut self.model, Progress::Resumed { step: state.step, epoch, records });
        }
    }

    fn step(&mut self, is_empty: bool) -> Result<(), Stopped> {
        if self.sharded.is_some() {
            return self.step_sharded(is_empty);
        }
        let started = self.machine.now();
        self.push_rows(is_empty)?;
        let path = self.path();
        let mine = self.header()?;
        if self.exact.is_some() {
            self.sum_micro_batches(is_empty)?;
        } else if is_empty {
            self.tensors.clear_gradient()?;
        }
        let summed = mem::replace(&mut self.summed, Ok(0))?;
        let buckets = self.model.bucket_len().map(|len| SummedBuckets { len, summed });
        let headers = self.tensors.sum(&mine, path, buckets)?;
        self.session.reports.reduced(self.machine.now() - started);
        self.report_transport(path);
        let headers = decode_all(headers)?;
        self.sum_again(&headers, path)?;
        self.tensors.begin_sum_check()?;
        let is_begun = self.begin_update(&headers)?;
        let is_finite = self.tensors.end_sum_check()?;
        let failed = self.session.fails_alone(&headers);
        self.session.summed(headers, is_finite).map_err(|mismatch| state_mismatch(&mismatch))?;
        if let Some(of_program) = failed.filter(|_| !self.session.is_handing_over()) {
            return Err(Failure::from(of_program).into());
        }
        if !self.session.has_sum() {
            self.tensors.keep_gradient()?;
        }
        // A poll may begin the next computation, which the next turn performs.
        if is_begun && let Task::Update { records, is_applied } = self.session.poll() {
            // Nothing may come between: the parameters are those of the step after the session's.
            return self.commit(records, is_applied);
        }
        Ok(())
    }

    /// Applies the step's reduced gradient, which is in `reduced`, and commits the step.
    fn update(&mut self, records: u64, is_applied: bool) -> Result<(), Stopped> {
        if is_applied {
            self.donor.end_copy();
            let tally = self.session.tally();
            observe(&mut self.model, Progress::Applied { tally });
        }
        if self.sharded.is_some() {
            return self.update_sharded(records, is_applied);
        }
        if is_applied {
            let (rule, model, step) = (&mut *self.rule, &mut self.model, self.session.step());
            let tensors = &mut self.tensors;
            call_user("the update", || match tensors {
                Tensors::Device { state, .. } => {
                    device::update(model, state.update(step, records), rule)
                }
                Tensors::Host { state, .. } => rule.apply(state.update(step, records)),
            })
            .map_err(Failure::local)?;
        }
        self.commit(records, is_applied)
    }

    /// Retains the sum of the step, whose update is enqueued if it `is_applied`.
    fn commit(&mut self, records: u64, is_applied: bool) -> Result<(), Stopped> {
        let (tensors, step) = (&mut self.tensors, self.session.step());
        if !is_applied && records > 0 {
            tracing::warn!(step = step + 1, "the gradient is not finite; the step is skipped");
        }
        let is_alone = tensors.group().is_none_or(|group| group.world_size() == 1);
        tensors.retain_reduced(is_alone)?;
        if let Some(tables) = &mut self.tables {
            let weight = self.session.tally().get(WEIGHT).copied();
            let divisor = weight.unwrap_or(records as f64) as f32;
            tables.commit(step, self.session.in_round(), (divisor, is_applied))?;
        }
        // The commit may end this group.
        let generation = self.session.group_rank().map(|(generation, _)| generation);
        let is_round = self.session.in_round().is_some();
        self.session.reports.note_learning_rate(self.rule.learning_rate(step));
        self.session.updated(self.machine.now() - self.started);
        if let Some(state) = self.session.state() {
            self.tensors.begin_window_digest(state.step)?;
        }
        if self.sharded.is_none() {
            self.observe_commit();
        }
        if let Some(generation) = generation
            && let Some(headers) = self.session.last_headers()
            && self.donor.is_serving()
        {
            let sum = self.tensors.to_host(Tensor::Retained)?;
            self.donor.committed(generation, step, headers, &sum);
        }
        if let (Some(source), Some(incoming)) = (&self.source, &self.incoming) {
            source.report(incoming.position(self.session.step()));
        }
        if is_round
            && let Some(generation) = generation
            && let Some(phases) = self.gap.on_commit(generation, self.machine.now())
        {
            let step = self.session.step();
            self.outbox.send(WorkerMessage::Resumed { generation, step, phases });
        }
        Ok(())
    }

    /// `pauses`: the group waits for records. A pause gives them time to arrive and limits the rate
    /// of idle rounds.
    fn exchange_headers(&mut self, pauses: bool) -> Result<(), Stopped> {
        tracing::debug!(step = self.session.step(), "waiting for records");
        if pauses && let Ok(message) = receive(&*self.machine, self.inbox, IDLE_PAUSE) {
            self.handle(message);
            if !matches!(self.session.poll(), Task::ExchangeHeaders { .. }) {
                return Ok(());
            }
        }
        self.path();
        let (mine, verifies) = (self.header()?, self.session.is_verifying());
        let headers: Vec<StepHeader> = decode_all(self.tensors.group_mut()?.all_gather(&mine)?)?;
        let failed = self.session.fails_alone(&headers);
        self.session.headers_exchanged(&headers).map_err(|mismatch| state_mismatch(&mismatch))?;
        if let Some(of_program) = failed.filter(|_| !self.session.is_handing_over()) {
            return Err(Failure::from(of_program).into());
        }
        // The lowest rank decides, as the others may not know yet which model is the best.
        if verifies || self.tables.is_some() { self.export_best(verifies) } else { Ok(()) }
    }

    fn on_broken(&mut self, error: &CollectiveError) {
        self.drop_links();
        tracing::info!(%error, "links broke");
        match error {
            CollectiveError::Unreachable { member, .. } => {
                self.session.unreachable_peer(WorkerId(*member), error.to_string());
            }
            _ => self.session.broken(error.member().map(WorkerId), error.to_string()),
        }
    }

    /// Leaves the links of a group that can't go on. This worker keeps its state.
    fn leave_links(&mut self, why: String) {
        tracing::warn!(why, "the group can't go on; this rank keeps its state");
        self.drop_links();
        self.session.broken(None, why);
    }

    fn drop_links(&mut self) {
        self.gap.on_trouble(self.machine.now());
        self.tensors.set_group(None);
        self.gap.on_stopped(self.machine.now());
    }

    fn send_reports(&mut self) {
        while let Some(report) = self.session.reports.poll() {
            self.outbox.send(report);
        }
    }
}

mod audit;
mod checkpoint_tasks;
mod compute;
mod deterministic;
#[cfg(feature = "gpu")]
mod device;
#[cfg(not(feature = "gpu"))]
#[path = "trainer/no_device.rs"]
mod device;
mod evaluation;
mod fed;
mod feed;
mod fetch;
mod finish;
mod gpu;
mod half;
mod incoming;
mod job_checkpoints;
mod lost_rows;
mod overlap;
mod parts;
mod peers;
mod reading;
mod row_export;
mod row_look_ahead;
mod row_tables;
mod sharded;
mod stopped;
mod table_memory;
mod validation;
mod work;

pub(crate) use self::device::is_on_gpu;
#[cfg(feature = "gpu")]
pub(crate) use self::device::nccl_policy;
pub(crate) use self::feed::feed;
use self::incoming::IncomingSnapshot;
pub(crate) use self::job_checkpoints::{Checkpointing, JobKey};
use self::row_tables::Regrouped;
pub use self::row_tables::ReplacedRows;
pub(crate) use self::row_tables::RowTables;
pub(crate) use self::sharded::ShardedOptimizer;
pub(crate) use self::stopped::Failed;
use self::stopped::{Stopped, decode_all, group_mismatch, state_mismatch};
pub(crate) use self::validation::Validation;

/// The kernel and the acceptor thread build links, so a peer that is busy computing delays no rank;
/// a peer that has not finished its step does. The master ends the wait for peers that never come.
const CONNECT_DEADLINE: Duration = Duration::from_secs(600);

/// How long a worker without its group keeps its state: longer than the next master takes to come.
const STAND_BY_MAX: Duration = Duration::from_secs(30);

/// Time that a rank without records waits for some before it starts the next idle round.
const IDLE_PAUSE: Duration = Duration::from_millis(5);
