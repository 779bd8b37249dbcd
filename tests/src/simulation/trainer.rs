//! A worker's trainer thread around the real [`Session`], modelled after `elasticdl`'s
//! `trainer`.

use std::collections::VecDeque;
use std::rc::Rc;
use std::time::Duration;

use elasticdl::core::halt::Ending;
use elasticdl::core::header::{StateRecord, StepHeader, SyncHeader};
use elasticdl::core::session::{Exit, JobPlan, Session, State, Task};
use elasticdl_master::job::{self, LedgerReport, MasterMessage, Phases, WorkerMessage};
use elasticdl_proto::{FileList, Generation, RecordRange, WorkerId};

use super::clock::Micros;
use super::fetch::{Donor, Source};
use super::model::Model;
use super::operation::{Collective, Done, Note, Operation};
use super::process::TrainerInput;
use super::ring::{Ring, WaitPoint};
use super::trace::trace;
use super::world::{Event, Setting, World};

/// The trainer thread of one process.
#[derive(Debug)]
pub(super) struct Trainer {
    pub(super) doing: Doing,
    /// Ticket of the wake-up that counts; wake-ups with older tickets are ignored.
    ticket: u32,
    woken: bool,
    /// `None` until the data set is known.
    pub(super) session: Option<Session>,
    pub(super) model: Model,
    pub(super) ring: Option<Ring>,
    /// The point at which it waits for its neighbours; the control thread reads it.
    pub(super) waiting: Option<WaitPoint>,
    pub(super) donor: Donor,
    pub(super) source: Option<Source>,
    /// Operations of the repair that are left.
    pub(super) repair: VecDeque<Collective>,
    /// Headers of the last step, if its reduced gradient has passed through this rank.
    pub(super) passed: Option<Vec<StepHeader>>,
    /// Generation and state record of the checkpoint that it has written a part of.
    pub(super) part_written: Option<(u64, StateRecord)>,
    /// Whether the last task was an idle header round.
    last_was_idle_round: bool,
    /// The newest generation that this worker has committed a step in.
    committed_in: Option<Generation>,
    /// Exit code of the process, once the trainer is done.
    pub(super) ended: Option<i32>,
}

/// What the thread does, or waits for.
#[derive(Debug)]
pub(super) enum Doing {
    /// Computing or preparing, until the wake-up that is scheduled.
    Busy(Busy),
    /// Waits for links, or for their end.
    Connecting,
    /// Waits for messages of a donor or of the master.
    Fetching,
    /// Not started, or done.
    Nothing,
    /// Waits for the pieces of an operation.
    Operating(Box<Operation>),
    /// Pauses before the next idle header round; messages of the master end the pause.
    Pausing,
    /// Waits for messages of the master.
    Receiving,
    /// Pauses before the next donor is asked; messages of the master end the pause.
    Resting,
}

#[derive(Debug)]
pub(super) enum Busy {
    Building(FileList),
    Computing,
    Describing,
    /// Between two tasks.
    Turning,
}

impl Trainer {
    pub(super) fn new(setting: &Setting) -> Self {
        Self {
            doing: Doing::Nothing,
            ticket: 0,
            woken: false,
            session: None,
            model: Model::new(setting.parameters()),
            ring: None,
            waiting: None,
            donor: Donor::default(),
            source: None,
            repair: VecDeque::new(),
            passed: None,
            part_written: None,
            last_was_idle_round: false,
            committed_in: None,
            ended: None,
        }
    }

    /// Ticket of the next wake-up that counts.
    pub(super) fn ticket(&self) -> u32 {
        self.ticket
    }

    /// The state that the session has absorbed.
    pub(super) fn state(&self) -> Option<&State> {
        self.session.as_ref().and_then(Session::state)
    }
}

impl World {
    // ---- wake-ups ----

    /// An input has arrived that the trainer may wait for.
    pub(super) fn wake_trainer(&mut self, p: usize) {
        let trainer = &self.processes[p].trainer;
        if trainer.woken || matches!(trainer.doing, Doing::Busy(_) | Doing::Nothing) {
            return;
        }
        let delay = self.thread_delay();
        self.wake_trainer_after(p, delay);
    }

    /// A packet has arrived on `link`.
    pub(super) fn wake_trainer_for(&mut self, p: usize, link: usize) {
        let trainer = &self.processes[p].trainer;
        let is_source = trainer.source.as_ref().is_some_and(|source| source.link == link);
        if is_source && matches!(trainer.doing, Doing::Fetching) {
            return self.wake_trainer(p);
        }
        let is_ours = |ring: &Ring| ring.next == Some(link) || ring.prev == Some(link);
        let waits = matches!(trainer.doing, Doing::Connecting | Doing::Operating(_));
        if waits && trainer.ring.as_ref().is_some_and(is_ours) {
            self.wake_trainer(p);
        }
    }

    fn wake_trainer_after(&mut self, p: usize, delay: Micros) {
        let trainer = &mut self.processes[p].trainer;
        trainer.woken = true;
        let ticket = trainer.ticket;
        self.clock.after(delay, Event::Trainer { p, ticket });
    }

    fn busy(&mut self, p: usize, delay: Micros, busy: Busy) {
        self.processes[p].trainer.doing = Doing::Busy(busy);
        self.wake_trainer_after(p, delay);
    }

    pub(super) fn on_trainer(&mut self, p: usize, ticket: u32) {
        let trainer = &mut self.processes[p].trainer;
        if trainer.ticket != ticket {
            return;
        }
        trainer.ticket += 1;
        trainer.woken = false;
        match std::mem::replace(&mut trainer.doing, Doing::Nothing) {
            Doing::Busy(Busy::Building(dataset)) => self.built(p, &dataset),
            Doing::Busy(Busy::Computing) => {
                if let Some(session) = &mut self.processes[p].trainer.session {
                    session.computed(0.0, 1);
                }
                self.turn_later(p);
            }
            Doing::Busy(Busy::Describing) => {
                let files = self.setting.files.iter().enumerate();
                let file = |(i, &records): (usize, &u64)| (format!("file-{i}"), records);
                let dataset = FileList::pack(files.map(file));
                self.queue_for_master(p, WorkerMessage::Described(Ok(dataset)));
                self.turn(p);
            }
            Doing::Busy(Busy::Turning) | Doing::Receiving => self.turn(p),
            Doing::Connecting => self.continue_connect(p),
            // The inbox is checked whenever the donor has sent nothing.
            Doing::Fetching => self.turn(p),
            Doing::Nothing => {}
            Doing::Operating(operation) => self.advance(p, operation),
            Doing::Pausing => {
                if let Some(input) = self.processes[p].inbox.pop_front() {
                    self.handle_input(p, input);
                    if self.processes[p]
                        .trainer
                        .session
                        .as_mut()
                        .is_some_and(|s| s.poll() != Task::ExchangeHeaders)
                    {
                        return self.turn_later(p);
                    }
                }
                self.operate(p, Collective::IdleRound);
            }
            Doing::Resting => {
                if let Some(input) = self.processes[p].inbox.pop_front() {
                    self.handle_input(p, input);
                }
                self.turn_later(p);
            }
        }
    }

    // ---- before the first membership ----

    pub(super) fn begin_training(&mut self, p: usize) {
        self.processes[p].trainer.doing = Doing::Receiving;
        self.wake_trainer(p);
    }

    /// Answers the master until the data set is known.
    fn prepare(&mut self, p: usize) {
        while let Some(input) = self.processes[p].inbox.pop_front() {
            match input {
                TrainerInput::Message(MasterMessage::Describe) => {
                    let delay = self.rng.between(100, self.setting.build_us);
                    return self.busy(p, delay, Busy::Describing);
                }
                TrainerInput::Message(MasterMessage::Prepare(dataset)) => {
                    let delay = self.rng.between(100, self.setting.build_us);
                    return self.busy(p, delay, Busy::Building(dataset));
                }
                TrainerInput::Message(MasterMessage::Shutdown(_)) => {
                    return self.end_trainer(p, &Exit::Shutdown(String::new()));
                }
                TrainerInput::Reconnected => {
                    self.queue_for_master(
                        p,
                        WorkerMessage::HeldLeases { step: 0, ranges: Vec::new() },
                    );
                }
                TrainerInput::Message(_) => {}
            }
        }
        self.processes[p].trainer.doing = Doing::Receiving;
    }

    fn built(&mut self, p: usize, dataset: &FileList) {
        let spec = &self.setting.spec;
        let plan = JobPlan {
            records: dataset.records(),
            epochs: spec.epochs,
            max_steps: spec.max_steps,
            batch: spec.batch,
            checkpoints: spec.checkpoints.as_ref().map(|kept| kept.every),
            // Evaluations are covered by the session's own tests.
            evaluation: None,
        };
        let process = &mut self.processes[p];
        let Some(worker) = process.worker else { return };
        let on_gpu = self.setting.gpus.is_some();
        process.trainer.session = Some(Session::new(worker, plan).on_gpu(on_gpu));
        trace!(self, "worker {worker}: is ready");
        let parameters = self.setting.parameters() as u64;
        self.queue_for_master(p, WorkerMessage::Ready { parameters });
        self.turn(p);
    }

    // ---- the loop ----

    /// Runs one task: handles the inbox, polls the session, starts the task.
    fn turn(&mut self, p: usize) {
        if self.processes[p].trainer.session.is_none() {
            return self.prepare(p);
        }
        while let Some(input) = self.processes[p].inbox.pop_front() {
            self.handle_input(p, input);
        }
        self.end_service_if_over(p);
        let Some(session) = &mut self.processes[p].trainer.session else { return };
        let task = session.poll();
        let last_was_idle_round = std::mem::replace(
            &mut self.processes[p].trainer.last_was_idle_round,
            task == Task::ExchangeHeaders,
        );
        match task {
            Task::Compute(ranges) => self.compute(p, &ranges),
            Task::Connect(membership) => self.connect(p, &membership),
            Task::Evaluate(_) => self.violate("the job has no evaluation".into()),
            Task::Exit(exit) => self.end_trainer(p, &exit),
            Task::Fetch(donor, address) => self.fetch(p, donor, address),
            Task::Finish => self.finish(p),
            Task::Repair(plan) => self.repair(p, &plan),
            Task::Step => {
                let model = &mut self.processes[p].trainer.model;
                if !model.gradient_is_pending {
                    model.gradient.fill(0);
                }
                self.operate(p, Collective::Step);
            }
            Task::Synchronize => self.operate(p, Collective::Synchronize),
            Task::ExchangeHeaders if last_was_idle_round => {
                // Messages that arrive meanwhile are handled during the pause.
                self.processes[p].trainer.doing = Doing::Pausing;
                let ticket = self.processes[p].trainer.ticket;
                self.clock.after(IDLE_ROUND_PAUSE_US, Event::Trainer { p, ticket });
            }
            Task::ExchangeHeaders => self.operate(p, Collective::IdleRound),
            Task::Wait => self.processes[p].trainer.doing = Doing::Receiving,
        }
    }

    /// The task is done: its reports are sent, and the next task follows.
    pub(super) fn turn_later(&mut self, p: usize) {
        self.poll_checkpoint_writer(p);
        self.report(p);
        let delay = self.thread_delay();
        self.busy(p, delay, Busy::Turning);
    }

    fn report(&mut self, p: usize) {
        while let Some(report) =
            self.processes[p].trainer.session.as_mut().and_then(Session::poll_report)
        {
            self.queue_for_master(p, report);
        }
    }

    fn queue_for_master(&mut self, p: usize, message: WorkerMessage) {
        self.processes[p].outbox.push_back(message);
        self.wake_control(p);
    }

    fn handle_input(&mut self, p: usize, input: TrainerInput) {
        let Some(session) = &mut self.processes[p].trainer.session else { return };
        let TrainerInput::Message(message) = input else {
            session.reconnected();
            let is_joiner = session.is_joiner();
            self.report(p);
            if is_joiner {
                let parameters = self.setting.parameters() as u64;
                self.queue_for_master(p, WorkerMessage::Ready { parameters });
            }
            return;
        };
        match message {
            MasterMessage::Describe | MasterMessage::Prepare(_) => {}
            MasterMessage::Drain => session.handle_drain(),
            MasterMessage::Fetch(donors) => session.handle_fetch(donors),
            MasterMessage::KeepCheckpoint => session.handle_checkpoint(),
            MasterMessage::Lease(ranges) => session.handle_lease(ranges),
            MasterMessage::Membership(membership) => {
                session.handle_membership(membership);
            }
            MasterMessage::Shutdown(reason) => session.handle_shutdown(reason),
            MasterMessage::Suspend => session.handle_suspend(),
        }
        // A message may be answered at once.
        self.report(p);
    }

    fn compute(&mut self, p: usize, ranges: &[RecordRange]) {
        let records = self.setting.records();
        self.processes[p].trainer.model.see(ranges, records);
        let mean = self.setting.record_us * ranges.iter().map(RecordRange::len).sum::<u64>();
        let late = if self.rng.chance(1, 100) { 40 } else { 1 };
        let delay = (mean / 2 + self.rng.below(mean + 1)) * late;
        self.busy(p, delay, Busy::Computing);
    }

    fn finish(&mut self, p: usize) {
        let trainer = &mut self.processes[p].trainer;
        let Some(session) = &mut trainer.session else { return };
        let (Some((generation, rank)), Some(state)) = (session.group_rank(), session.state())
        else {
            return;
        };
        let finished = job::Finished {
            generation,
            step: state.step,
            digest: trainer.model.digest(),
            ledger: LedgerReport::from(&state.ledger),
            records_trained: state.records_trained,
            stopped_early: false,
            summary: (rank == 0).then(|| "counted".into()),
            failure: None,
            suspended: session.ended() == Some(&Ending::Suspended),
            steps_skipped: 0,
            exported: false,
        };
        trace!(self, "{}: holds the final state, step {}", self.name(p), finished.step);
        if let Some(session) = &mut self.processes[p].trainer.session {
            session.finish_reported();
        }
        if !finished.suspended {
            self.record_final_state(p, generation);
        }
        self.queue_for_master(p, WorkerMessage::Finished(finished));
        self.turn_later(p);
    }

    fn end_trainer(&mut self, p: usize, exit: &Exit) {
        trace!(self, "{}: is done, {exit:?}", self.name(p));
        self.leave_ring(p);
        self.drop_source(p);
        self.end_transfers(p);
        self.close_endpoint(p);
        let trainer = &mut self.processes[p].trainer;
        trainer.doing = Doing::Nothing;
        trainer.ended = Some(match exit {
            Exit::Left | Exit::Shutdown(_) => 0,
            Exit::Outdated => 70,
        });
        self.check_exit(p, exit);
        self.wake_control(p);
    }

    // ---- results of operations ----

    /// An operation of the group is complete on this rank.
    pub(super) fn operated(&mut self, p: usize, done: Done) {
        let Done { what, notes, body, is_root } = done;
        match what {
            Collective::Step => self.stepped(p, &notes),
            Collective::Synchronize => self.synchronized(p, &notes),
            Collective::IdleRound => {
                let headers = self.step_headers(&notes);
                self.note_nccl_round(p, &headers);
                if self.are_at_one_step(p, &headers) {
                    self.serve_state_requests(p);
                }
                let session = self.processes[p].trainer.session.as_mut();
                if let Some(Err(mismatch)) = session.map(|s| s.headers_exchanged(&headers)) {
                    return self.violate(format!("{}: {mismatch:?}", self.name(p)));
                }
                self.turn_later(p);
            }
            Collective::NcclId => self.begin_nccl(p),
            Collective::ResultHeaders { .. } => {
                if !is_root
                    && let Some(Note::Headers(headers)) =
                        notes.iter().flatten().next().map(Rc::as_ref)
                {
                    self.processes[p].trainer.passed = Some(headers.clone());
                }
                self.continue_repair(p);
            }
            Collective::Result { apply, .. } => {
                if !is_root {
                    self.processes[p].trainer.model.reduced = body;
                }
                if apply && let Some(headers) = self.processes[p].trainer.passed.take() {
                    self.oracle.coverage.repaired_by_result += 1;
                    self.update(p, headers);
                }
                self.continue_repair(p);
            }
            Collective::StateRecord { .. } => {
                if let Some(Note::Record(record, lineage)) =
                    notes.iter().flatten().next().map(Rc::as_ref)
                {
                    let ring = self.processes[p].trainer.ring.as_mut();
                    ring.into_iter()
                        .for_each(|ring| ring.record = Some((record.clone(), *lineage)));
                }
                self.continue_repair(p);
            }
            Collective::State { take, .. } => {
                if take {
                    self.take_state(p, body);
                }
                self.continue_repair(p);
            }
        }
    }

    fn stepped(&mut self, p: usize, notes: &[Option<Rc<Note>>]) {
        let headers = self.step_headers(notes);
        let Some(session) = &self.processes[p].trainer.session else { return };
        if let Err(mismatch) = session.check(&headers) {
            return self.violate(format!("{}: {mismatch:?}", self.name(p)));
        }
        let place = session.group_rank();
        self.check_sum(p, &headers);
        self.note_nccl_round(p, &headers);
        self.serve_state_requests(p);
        self.update(p, headers);
        let trainer = &mut self.processes[p].trainer;
        trainer.model.gradient_is_pending = false;
        let step = trainer.state().map_or(0, |s| s.step);
        if let Some((generation, _)) = place
            && trainer.committed_in.replace(generation).is_some_and(|before| before != generation)
        {
            let phases = Phases { first_step_us: 1, ..Phases::default() };
            self.queue_for_master(p, WorkerMessage::Resumed { generation, step, phases });
        }
        self.turn_later(p);
    }

    /// Applies the reduced gradient and adds the step's records to the ledger.
    pub(super) fn update(&mut self, p: usize, headers: Vec<StepHeader>) {
        let now = Duration::from_micros(self.clock.now());
        let trainer = &mut self.processes[p].trainer;
        let Some(session) = &mut trainer.session else { return };
        let place = session.group_rank();
        let before = trainer.model.digest();
        trainer.model.update();
        session.commit(headers.clone(), now);
        if let Some((generation, _)) = place {
            self.check_commit(p, generation, before);
            self.send_result(p, generation, &headers);
        }
    }

    fn are_at_one_step(&self, p: usize, headers: &[StepHeader]) -> bool {
        self.processes[p]
            .trainer
            .session
            .as_ref()
            .is_some_and(|session| session.check(headers).is_ok())
    }

    fn synchronized(&mut self, p: usize, notes: &[Option<Rc<Note>>]) {
        let states = notes.iter().flatten().filter_map(|note| match note.as_ref() {
            Note::Sync(header, failures) => Some((header, failures)),
            _ => None,
        });
        self.note_nccl_met(p, states.clone().map(|(_, failures)| failures));
        let headers: Vec<SyncHeader> = states.map(|(header, _)| header.clone()).collect();
        let session = self.processes[p].trainer.session.as_mut();
        if let Some(Err(mismatch)) = session.map(|s| s.synced(&headers)) {
            return self.violate(format!("{}: {mismatch:?}", self.name(p)));
        }
        self.turn_later(p);
    }

    fn step_headers(&self, notes: &[Option<Rc<Note>>]) -> Vec<StepHeader> {
        let header = |note: &Rc<Note>| match note.as_ref() {
            Note::Step(header) => Some(header.clone()),
            _ => None,
        };
        notes.iter().flatten().filter_map(header).collect()
    }

    // ---- failures ----

    /// The ring, or the attempt to build one, has failed.
    pub(super) fn broke(&mut self, p: usize, suspect: Option<WorkerId>, why: &str) {
        self.drop_links(p, suspect, why);
        if let Some(session) = &mut self.processes[p].trainer.session {
            session.broken(suspect, why.into());
        }
        self.turn_later(p);
    }

    /// The next member's kernel has not answered a dial.
    pub(super) fn unanswered(&mut self, p: usize, suspect: WorkerId) {
        let why = "the next member does not answer the dial";
        self.drop_links(p, Some(suspect), why);
        if let Some(session) = &mut self.processes[p].trainer.session {
            session.unreachable_peer(suspect, why.into());
        }
        self.turn_later(p);
    }

    fn drop_links(&mut self, p: usize, suspect: Option<WorkerId>, why: &str) {
        trace!(self, "{}: links broke, {why}, suspects {suspect:?}", self.name(p));
        self.check_break(p, why);
        self.leave_ring(p);
        let trainer = &mut self.processes[p].trainer;
        trainer.repair.clear();
        trainer.passed = None;
    }
}

const IDLE_ROUND_PAUSE_US: Micros = 5000;
