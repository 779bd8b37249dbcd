//! A worker's trainer thread around the real [`Session`], modelled after `elasticdl`'s
//! `trainer`.

use std::num::NonZeroU64;
use std::rc::Rc;
use std::time::Duration;

use elasticdl::session::halt::Ending;
use elasticdl::session::header::{StepHeader, SyncHeader};
use elasticdl::session::plan::StepSize;
use elasticdl::session::{Computed, Exit, FinalState, GroupMismatch, JobPlan, Session, Task};
use elasticdl_master::job::{MasterMessage, Phases, WorkerMessage};
use elasticdl_proto::{FileList, RecordRange, WorkerId};

use super::clock::Micros;
use super::state::event::Event;
use super::state::operation::{Collective, Done, Note};
use super::state::process::TrainerInput;
use super::state::ring::Ring;
use super::state::trainer::{Busy, Doing};
use super::trace::trace;
use super::world::World;

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
        if trainer.donor.serves_over(link) {
            return self.wake_delivery(p, link);
        }
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
        if trainer.ticket != ticket || trainer.is_hung {
            return;
        }
        trainer.ticket += 1;
        trainer.woken = false;
        match std::mem::replace(&mut trainer.doing, Doing::Nothing) {
            Doing::Busy(Busy::Building(dataset)) => self.built(p, &dataset),
            Doing::Busy(Busy::Computing { compute_us }) => {
                if let Some(session) = &mut self.processes[p].trainer.session {
                    session.assignment.computed(Computed { compute_us, ..Default::default() });
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
                        .is_some_and(|s| !matches!(s.poll(), Task::ExchangeHeaders { .. }))
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
                    self.queue_for_master(p, WorkerMessage::Reconnected { step: 0 });
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
            size: StepSize {
                batch: spec.batch,
                micro_batch: spec.micro_batch.map_or(1, NonZeroU64::get),
            },
            checkpoints: spec.checkpoints.as_ref().map(|kept| kept.every),
            // Evaluations are covered by the session's own tests.
            evaluation: None,
            skips_nonfinite: false,
            allows_mixed_builds: false,
            exports_best: false,
        };
        let (on_gpu, origin) = (self.setting.gpus.is_some(), self.origin(p));
        let process = &mut self.processes[p];
        let Some(worker) = process.worker else { return };
        let mut session = Session::new(worker, plan).on_gpu(on_gpu).of(origin);
        session.ready(self.setting.parameters() as u64);
        process.trainer.session = Some(session);
        trace!(self, "worker {worker}: is ready");
        self.report(p);
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
        self.serve_state_requests(p);
        let Some(session) = &mut self.processes[p].trainer.session else { return };
        match session.poll() {
            Task::Broadcast { root, what } => {
                self.operate(p, Collective::Broadcast { root, what });
            }
            Task::BuildNccl => self.operate(p, Collective::NcclId),
            Task::Compute { ranges, is_first } => self.compute(p, &ranges, is_first),
            Task::Connect(membership) => self.connect(p, &membership),
            Task::CreateState => self.create_state(p),
            Task::EndRepair => self.end_repair(p),
            Task::InspectGradient => self.violate("the gradient is always finite".into()),
            Task::Update { .. } => self.update(p),
            Task::Evaluate(_) => self.violate("the job has no evaluation".into()),
            Task::Exit(exit) => self.end_trainer(p, &exit),
            Task::Fetch(donor, address) => self.fetch(p, donor, address),
            Task::Finish { is_published } => self.finish(p, is_published),
            Task::Step { is_empty } => {
                let model = &mut self.processes[p].trainer.model;
                if is_empty {
                    model.gradient.fill(0);
                }
                self.operate(p, Collective::Step);
            }
            Task::Synchronize => self.operate(p, Collective::Synchronize),
            Task::ExchangeHeaders { pauses: true } => {
                // Messages that arrive meanwhile are handled during the pause.
                self.processes[p].trainer.doing = Doing::Pausing;
                let ticket = self.processes[p].trainer.ticket;
                self.clock.after(IDLE_ROUND_PAUSE_US, Event::Trainer { p, ticket });
            }
            Task::ExchangeHeaders { pauses: false } => self.operate(p, Collective::IdleRound),
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
            self.processes[p].trainer.session.as_mut().and_then(|session| session.reports.poll())
        {
            self.queue_for_master(p, report);
        }
    }

    pub(super) fn queue_for_master(&mut self, p: usize, message: WorkerMessage) {
        self.processes[p].outbox.push_back(message);
        self.wake_control(p);
    }

    fn handle_input(&mut self, p: usize, input: TrainerInput) {
        let Some(session) = &mut self.processes[p].trainer.session else { return };
        match input {
            TrainerInput::Message(message) => session.handle(message),
            TrainerInput::Reconnected => session.reconnected(),
        }
        // A message may be answered at once.
        self.report(p);
    }

    fn compute(&mut self, p: usize, ranges: &[RecordRange], is_first: bool) {
        let (read, unread) = self.read(ranges);
        let records = self.setting.records();
        let model = &mut self.processes[p].trainer.model;
        if is_first {
            model.gradient.fill(0);
        }
        model.see(&read, records);
        if let Some(session) = &mut self.processes[p].trainer.session {
            session.assignment.not_read(&unread);
        }
        let mean = self.setting.record_us * read.iter().map(RecordRange::len).sum::<u64>();
        let late = if self.rng.chance(1, 100) { 40 } else { 1 };
        let delay = (mean / 2 + self.rng.below(mean + 1)) * late;
        self.busy(p, delay, Busy::Computing { compute_us: delay });
    }

    fn finish(&mut self, p: usize, is_published: bool) {
        let trainer = &mut self.processes[p].trainer;
        let Some(session) = &mut trainer.session else { return };
        let generation = session.group_rank().map(|(generation, _)| generation);
        let is_suspended = session.ended() == Some(&Ending::Suspended);
        session.finish(FinalState {
            digest: trainer.model.digest(),
            parameters_are_finite: true,
            summary: is_published.then(|| "counted".into()),
            is_exported: false,
            export_error: None,
        });
        trace!(self, "{}: holds the final state", self.name(p));
        match generation {
            Some(generation) if is_suspended => self.oracle.suspended = Some(generation),
            Some(generation) => self.record_final_state(p, generation),
            None => {}
        }
        self.turn_later(p);
    }

    fn end_trainer(&mut self, p: usize, exit: &Exit) {
        trace!(self, "{}: is done, {exit:?}", self.name(p));
        self.check_exit(p, exit);
        self.stop_trainer(
            p,
            match exit {
                Exit::Left | Exit::Shutdown(_) => 0,
                Exit::Outdated => 70,
            },
        );
    }

    /// The trainer ends, and with it its process, with this code.
    pub(super) fn stop_trainer(&mut self, p: usize, code: i32) {
        self.leave_ring(p);
        self.drop_source(p);
        self.end_transfers(p);
        self.close_endpoint(p);
        let trainer = &mut self.processes[p].trainer;
        trainer.doing = Doing::Nothing;
        trainer.ended = Some(code);
        self.wake_control(p);
    }

    // ---- results of operations ----

    /// An operation of the group is complete on this rank.
    pub(super) fn operated(&mut self, p: usize, done: Done) {
        match done.what {
            Collective::Broadcast { what, .. } => self.broadcast(p, what, done),
            Collective::Step => self.stepped(p, &done.notes),
            Collective::Synchronize => self.synchronized(p, &done.notes),
            Collective::IdleRound => {
                let headers = self.step_headers(&done.notes);
                let session = self.processes[p].trainer.session.as_mut();
                if let Some(Err(mismatch)) = session.map(|s| s.headers_exchanged(&headers)) {
                    return self.differs(p, &mismatch);
                }
                self.note_nccl_round(p, &headers);
                self.turn_later(p);
            }
            Collective::NcclId => self.begin_nccl(p),
        }
    }

    fn stepped(&mut self, p: usize, notes: &[Option<Rc<Note>>]) {
        let headers = self.step_headers(notes);
        self.check_sum(p, &headers);
        let session = self.processes[p].trainer.session.as_mut();
        if let Some(Err(mismatch)) = session.map(|s| s.summed(headers.clone(), true)) {
            return self.differs(p, &mismatch);
        }
        self.note_nccl_round(p, &headers);
        self.turn_later(p);
    }

    /// Applies the reduced gradient and adds the step's records to the ledger.
    fn update(&mut self, p: usize) {
        let now = Duration::from_micros(self.clock.now());
        let trainer = &mut self.processes[p].trainer;
        let Some(session) = &mut trainer.session else { return };
        let (group, is_round) = (session.group_rank(), session.in_round().is_some());
        let before = trainer.model.digest();
        let state = session.state().cloned();
        trainer.model.update();
        session.updated(now);
        let step = session.step();
        let headers = session.last_headers().unwrap_or_default().to_vec();
        // A joiner may drop its state right after the step: a membership that arrived meanwhile can
        // follow another history than its donor's.
        let is_kept = session.state().is_some();
        if let Some(state) = state.filter(|_| is_kept) {
            self.check_order(p, &state, &headers);
        }
        let Some((generation, _)) = group else {
            self.oracle.coverage.followed += 1;
            self.report_position(p);
            return self.turn_later(p);
        };
        self.oracle.coverage.repaired_by_result += u64::from(!is_round);
        self.check_commit(p, generation, before);
        self.send_result(p, generation, &headers);
        let before = &mut self.processes[p].trainer.committed_in;
        if is_round && before.replace(generation).is_some_and(|before| before != generation) {
            let phases = Phases { first_step_us: 1, ..Phases::default() };
            self.queue_for_master(p, WorkerMessage::Resumed { generation, step, phases });
        }
        self.turn_later(p);
    }

    fn synchronized(&mut self, p: usize, notes: &[Option<Rc<Note>>]) {
        let states = notes.iter().flatten().filter_map(|note| match note.as_ref() {
            Note::Sync(header, failures) => Some((header, failures)),
            _ => None,
        });
        self.note_nccl_met(p, states.clone().map(|(_, failures)| failures));
        let headers: Vec<SyncHeader> = states.map(|(header, _)| header.clone()).collect();
        let session = self.processes[p].trainer.session.as_mut();
        match session.map(|s| s.synced(&headers)) {
            Some(Err(GroupMismatch::Program(other))) => return self.is_other(p, other.to_string()),
            Some(Err(GroupMismatch::State(mismatch))) => return self.differs(p, &mismatch),
            Some(Err(mismatch)) => {
                return self.violate(format!("{}: {mismatch:?}", self.name(p)));
            }
            Some(Ok(())) | None => {}
        }
        self.turn_later(p);
    }

    fn step_headers(&self, notes: &[Option<Rc<Note>>]) -> Vec<StepHeader> {
        let header = |note: &Rc<Note>| match note.as_ref() {
            Note::Step(header) => Some(header.as_ref().clone()),
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
    }
}

const IDLE_ROUND_PAUSE_US: Micros = 5000;
