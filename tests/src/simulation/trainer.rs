//! A worker's training thread around the real [`Session`], after `elasticdl_worker`'s `trainer`.

use std::collections::VecDeque;
use std::rc::Rc;
use std::time::Duration;

use elasticdl_master::job::{self, FromWorker, LedgerReport, Phases, ToWorker};
use elasticdl_proto::{FileList, Generation, Ledger, RecordRange, WorkerId};
use elasticdl_worker::core::checkpoint::Every;
use elasticdl_worker::core::halt::Ending;
use elasticdl_worker::core::header::{StateRecord, StepHeader, SyncHeader};
use elasticdl_worker::core::plan;
use elasticdl_worker::core::session::{Exit, JobPlan, Membership, Report, Session, State, Task};

use super::clock::Micros;
use super::fetch::{Donor, Source};
use super::model::Model;
use super::operation::{Done, Note, Operation, What};
use super::process::Word;
use super::ring::{Ring, Waiting};
use super::story::tell;
use super::world::{Event, Setting, World};

/// The training thread of one process.
#[derive(Debug)]
pub(super) struct Trainer {
    pub(super) doing: Doing,
    /// Of the wake-up that counts; older ones were overtaken.
    ticket: u32,
    woken: bool,
    /// Once the data set is known.
    pub(super) session: Option<Session>,
    pub(super) model: Model,
    pub(super) ring: Option<Ring>,
    /// Where it waits for its neighbours, for the control thread to see.
    pub(super) waiting: Option<Waiting>,
    pub(super) donor: Donor,
    pub(super) source: Option<Source>,
    /// What is left to do of a repair.
    pub(super) repair: VecDeque<What>,
    /// Headers of the last step, where its reduced gradient has passed through this rank.
    pub(super) passed: Option<Vec<StepHeader>>,
    /// The checkpoint that it has written a part of, and its group.
    pub(super) keeps: Option<(u64, StateRecord)>,
    /// The last task was a talk.
    talked: bool,
    /// The newest generation that this worker has committed a step in.
    committed_in: Option<Generation>,
    /// It is over, and the process is to end with this code.
    pub(super) ended: Option<i32>,
}

/// What the thread does, or waits for.
#[derive(Debug)]
pub(super) enum Doing {
    /// Its own business, until the wake-up that is due.
    Busy(Busy),
    /// Links, or news of their end.
    Connecting,
    /// Parcels of a donor, or words of the master.
    Fetching,
    /// Nothing yet, or nothing any more.
    Nothing,
    /// The pieces of an operation.
    Operating(Box<Operation>),
    /// Words of the master, for a moment, before the next talk.
    Pausing,
    /// Words of the master.
    Receiving,
    /// Words of the master, for a moment, before the next donor is asked.
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
            keeps: None,
            talked: false,
            committed_in: None,
            ended: None,
        }
    }

    /// Of the next wake-up that counts.
    pub(super) fn ticket(&self) -> u32 {
        self.ticket
    }

    /// What the parameters have absorbed, by the session's word.
    pub(super) fn state(&self) -> Option<&State> {
        self.session.as_ref().and_then(Session::state)
    }
}

impl World {
    // ---- wake-ups ----

    /// Something has come that the trainer may wait for.
    pub(super) fn wake_trainer(&mut self, p: usize) {
        let trainer = &self.processes[p].trainer;
        if trainer.woken || matches!(trainer.doing, Doing::Busy(_) | Doing::Nothing) {
            return;
        }
        let delay = self.thread_delay();
        self.wake_trainer_after(p, delay);
    }

    /// Something has arrived on `link`.
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
                self.tell_master(p, FromWorker::Described(Ok(dataset)));
                self.turn(p);
            }
            Doing::Busy(Busy::Turning) | Doing::Receiving => self.turn(p),
            Doing::Connecting => self.go_on_connecting(p),
            // The inbox is looked at whenever nothing has come.
            Doing::Fetching => self.turn(p),
            Doing::Nothing => {}
            Doing::Operating(operation) => self.advance(p, operation),
            Doing::Pausing => {
                if let Some(word) = self.processes[p].inbox.pop_front() {
                    self.hand_over(p, word);
                    if self.processes[p]
                        .trainer
                        .session
                        .as_mut()
                        .is_some_and(|s| s.poll() != Task::Talk)
                    {
                        return self.turn_later(p);
                    }
                }
                self.operate(p, What::Talk);
            }
            Doing::Resting => {
                if let Some(word) = self.processes[p].inbox.pop_front() {
                    self.hand_over(p, word);
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
        while let Some(word) = self.processes[p].inbox.pop_front() {
            match word {
                Word::Said(ToWorker::Describe) => {
                    let delay = self.dice.between(100, self.setting.build_us);
                    return self.busy(p, delay, Busy::Describing);
                }
                Word::Said(ToWorker::Prepare(dataset)) => {
                    let delay = self.dice.between(100, self.setting.build_us);
                    return self.busy(p, delay, Busy::Building(dataset));
                }
                Word::Said(ToWorker::Shutdown(_)) => {
                    return self.end_trainer(p, &Exit::Shutdown(String::new()));
                }
                Word::Reconnected => {
                    self.tell_master(p, FromWorker::Holding { step: 0, ranges: Vec::new() });
                }
                Word::Said(_) => {}
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
            batch: match spec.batch {
                job::Batch::Global(records) => plan::Batch::Global(records.get()),
                job::Batch::PerWorker(records) => plan::Batch::PerWorker(records.get()),
            },
            checkpoints: spec.checkpoints.as_ref().map(|kept| match kept.every {
                job::CheckpointEvery::Steps(steps) => Every::Steps(steps.get()),
                job::CheckpointEvery::Time(time) => Every::Time(time),
            }),
            // What there is to say of evaluations, the session's own tests say.
            evaluation: None,
        };
        let process = &mut self.processes[p];
        let Some(worker) = process.worker else { return };
        let on_gpu = self.setting.gpus.is_some();
        process.trainer.session = Some(Session::new(worker, plan).on_gpu(on_gpu));
        tell!(self, "worker {worker}: is ready");
        let parameters = self.setting.parameters() as u64;
        self.tell_master(p, FromWorker::Ready { parameters });
        self.turn(p);
    }

    // ---- the loop ----

    /// One task, from the inbox to the reports.
    fn turn(&mut self, p: usize) {
        if self.processes[p].trainer.session.is_none() {
            return self.prepare(p);
        }
        while let Some(word) = self.processes[p].inbox.pop_front() {
            self.hand_over(p, word);
        }
        self.receive_visitors(p);
        let Some(session) = &mut self.processes[p].trainer.session else { return };
        let task = session.poll();
        let talked = std::mem::replace(&mut self.processes[p].trainer.talked, task == Task::Talk);
        match task {
            Task::Compute(ranges) => self.compute(p, &ranges),
            Task::Connect(membership) => self.connect(p, &membership),
            Task::Evaluate(_) => self.violate("there is nothing to evaluate".into()),
            Task::Exit(exit) => self.end_trainer(p, &exit),
            Task::Fetch(donor, address) => self.fetch(p, donor, address),
            Task::Finish => self.finish(p),
            Task::Repair(plan) => self.repair(p, &plan),
            Task::Step => {
                let model = &mut self.processes[p].trainer.model;
                if !model.gradient_is_pending {
                    model.gradient.fill(0);
                }
                self.operate(p, What::Step);
            }
            Task::Synchronize => self.operate(p, What::Synchronize),
            Task::Talk if talked => {
                // Words that have come meanwhile are heard in the pause.
                self.processes[p].trainer.doing = Doing::Pausing;
                let ticket = self.processes[p].trainer.ticket;
                self.clock.after(TALK_PAUSE_US, Event::Trainer { p, ticket });
            }
            Task::Talk => self.operate(p, What::Talk),
            Task::Wait => self.processes[p].trainer.doing = Doing::Receiving,
        }
    }

    /// The task is done: its reports go out, and the next one comes.
    pub(super) fn turn_later(&mut self, p: usize) {
        self.tend_checkpoints(p);
        self.report(p);
        let delay = self.thread_delay();
        self.busy(p, delay, Busy::Turning);
    }

    fn report(&mut self, p: usize) {
        while let Some(report) =
            self.processes[p].trainer.session.as_mut().and_then(Session::poll_report)
        {
            self.tell_master(p, from_report(report));
        }
    }

    fn tell_master(&mut self, p: usize, message: FromWorker) {
        self.processes[p].outbox.push_back(message);
        self.wake_control(p);
    }

    fn hand_over(&mut self, p: usize, word: Word) {
        let Some(session) = &mut self.processes[p].trainer.session else { return };
        let Word::Said(word) = word else {
            session.reconnected();
            let is_newcomer = session.is_newcomer();
            self.report(p);
            if is_newcomer {
                let parameters = self.setting.parameters() as u64;
                self.tell_master(p, FromWorker::Ready { parameters });
            }
            return;
        };
        match word {
            ToWorker::Describe | ToWorker::Prepare(_) => {}
            ToWorker::Drain => session.handle_drain(),
            ToWorker::Fetch(donors) => session.handle_fetch(donors),
            ToWorker::KeepCheckpoint => session.handle_checkpoint(),
            ToWorker::Lease(ranges) => session.handle_lease(ranges),
            ToWorker::Membership(job::Membership { generation, members, abort }) => {
                session.handle_membership(Membership { generation, members, abort });
            }
            ToWorker::Shutdown(reason) => session.handle_shutdown(reason),
            ToWorker::Suspend => session.handle_suspend(),
        }
        // A word may be answered at once.
        self.report(p);
    }

    fn compute(&mut self, p: usize, ranges: &[RecordRange]) {
        let records = self.setting.records();
        self.processes[p].trainer.model.see(ranges, records);
        let mean = self.setting.record_us * ranges.iter().map(RecordRange::len).sum::<u64>();
        let late = if self.dice.chance(1, 100) { 40 } else { 1 };
        let delay = (mean / 2 + self.dice.below(mean + 1)) * late;
        self.busy(p, delay, Busy::Computing);
    }

    fn finish(&mut self, p: usize) {
        let trainer = &mut self.processes[p].trainer;
        let Some(session) = &mut trainer.session else { return };
        let (Some((generation, rank)), Some(state)) = (session.place(), session.state()) else {
            return;
        };
        let finished = job::Finished {
            generation,
            step: state.step,
            digest: trainer.model.digest(),
            ledger: ledger_report(&state.ledger),
            records_trained: state.records_trained,
            stopped_early: false,
            summary: (rank == 0).then(|| "counted".into()),
            failure: None,
            suspended: session.ended() == Some(&Ending::Suspended),
            steps_skipped: 0,
            exported: false,
        };
        tell!(self, "{}: holds the final state, step {}", self.name(p), finished.step);
        if let Some(session) = &mut self.processes[p].trainer.session {
            session.told();
        }
        if !finished.suspended {
            self.books_finish(p, generation);
        }
        self.tell_master(p, FromWorker::Finished(finished));
        self.turn_later(p);
    }

    fn end_trainer(&mut self, p: usize, exit: &Exit) {
        tell!(self, "{}: is done, {exit:?}", self.name(p));
        self.leave_ring(p);
        self.leave_source(p);
        self.dismiss(p);
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

    // ---- what operations bring ----

    /// An operation of the group is complete on this rank.
    pub(super) fn operated(&mut self, p: usize, done: Done) {
        let Done { what, notes, body, is_root } = done;
        match what {
            What::Step => self.stepped(p, &notes),
            What::Synchronize => self.synchronized(p, &notes),
            What::Talk => {
                let headers = self.step_headers(&notes);
                self.note_nccl_round(p, &headers);
                if self.are_at_one_step(p, &headers) {
                    self.serve_visitors(p);
                }
                let session = self.processes[p].trainer.session.as_mut();
                if let Some(Err(mismatch)) = session.map(|s| s.talked(&headers)) {
                    return self.violate(format!("{}: {mismatch:?}", self.name(p)));
                }
                self.turn_later(p);
            }
            What::NcclId => self.begin_nccl(p),
            What::ResultHeaders { .. } => {
                if !is_root
                    && let Some(Note::Headers(headers)) =
                        notes.iter().flatten().next().map(Rc::as_ref)
                {
                    self.processes[p].trainer.passed = Some(headers.clone());
                }
                self.go_on_repairing(p);
            }
            What::Result { apply, .. } => {
                if !is_root {
                    self.processes[p].trainer.model.reduced = body;
                }
                if apply && let Some(headers) = self.processes[p].trainer.passed.take() {
                    self.books.tally.repaired_by_result += 1;
                    self.update(p, headers);
                }
                self.go_on_repairing(p);
            }
            What::StateRecord { .. } => {
                if let Some(Note::Record(record, era)) =
                    notes.iter().flatten().next().map(Rc::as_ref)
                {
                    let ring = self.processes[p].trainer.ring.as_mut();
                    ring.into_iter().for_each(|ring| ring.record = Some((record.clone(), *era)));
                }
                self.go_on_repairing(p);
            }
            What::State { take, .. } => {
                if take {
                    self.take_state(p, body);
                }
                self.go_on_repairing(p);
            }
        }
    }

    fn stepped(&mut self, p: usize, notes: &[Option<Rc<Note>>]) {
        let headers = self.step_headers(notes);
        let Some(session) = &self.processes[p].trainer.session else { return };
        if let Err(mismatch) = session.check(&headers) {
            return self.violate(format!("{}: {mismatch:?}", self.name(p)));
        }
        let place = session.place();
        self.check_sum(p, &headers);
        self.note_nccl_round(p, &headers);
        self.serve_visitors(p);
        self.update(p, headers);
        let trainer = &mut self.processes[p].trainer;
        trainer.model.gradient_is_pending = false;
        let step = trainer.state().map_or(0, |s| s.step);
        if let Some((generation, _)) = place
            && trainer.committed_in.replace(generation).is_some_and(|before| before != generation)
        {
            let phases = Phases { first_step_us: 1, ..Phases::default() };
            self.tell_master(p, FromWorker::Resumed { generation, step, phases });
        }
        self.turn_later(p);
    }

    /// Applies the reduced gradient and takes the step's records into the ledger.
    pub(super) fn update(&mut self, p: usize, headers: Vec<StepHeader>) {
        let now = Duration::from_micros(self.clock.now());
        let trainer = &mut self.processes[p].trainer;
        let Some(session) = &mut trainer.session else { return };
        let place = session.place();
        let before = trainer.model.digest();
        trainer.model.update();
        session.commit(headers.clone(), now);
        if let Some((generation, _)) = place {
            self.check_commit(p, generation, before);
            self.give_result(p, generation, &headers);
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
        let words = notes.iter().flatten().filter_map(|note| match note.as_ref() {
            Note::Sync(header, failures) => Some((header, failures)),
            _ => None,
        });
        self.note_nccl_met(p, words.clone().map(|(_, failures)| failures));
        let headers: Vec<SyncHeader> = words.map(|(header, _)| header.clone()).collect();
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

    // ---- trouble ----

    /// The ring, or the attempt to build one, has failed.
    pub(super) fn broke(&mut self, p: usize, suspect: Option<WorkerId>, why: &str) {
        self.drop_links(p, suspect, why);
        if let Some(session) = &mut self.processes[p].trainer.session {
            session.broken(suspect, why.into());
        }
        self.turn_later(p);
    }

    /// The next member's kernel has answered no dial.
    pub(super) fn unanswered(&mut self, p: usize, suspect: WorkerId) {
        let why = "the next member answers no dial";
        self.drop_links(p, Some(suspect), why);
        if let Some(session) = &mut self.processes[p].trainer.session {
            session.unanswered(suspect, why.into());
        }
        self.turn_later(p);
    }

    fn drop_links(&mut self, p: usize, suspect: Option<WorkerId>, why: &str) {
        tell!(self, "{}: links broke, {why}, suspects {suspect:?}", self.name(p));
        self.check_break(p, why);
        self.leave_ring(p);
        let trainer = &mut self.processes[p].trainer;
        trainer.repair.clear();
        trainer.passed = None;
    }
}

fn ledger_report(ledger: &Ledger) -> LedgerReport {
    LedgerReport {
        epochs_complete: ledger.epoch(),
        ranges: ledger.ranges().collect(),
        repeated: ledger.repeated(),
    }
}

/// As it arrives at the master.
fn from_report(report: Report) -> FromWorker {
    match report {
        Report::Broken { generation, suspect, error, unreachable } => {
            FromWorker::Broken { generation, suspect, error, unreachable }
        }
        Report::Committed(progress) => FromWorker::Committed(job::Committed {
            generation: progress.generation,
            step: progress.step,
            ranges: progress.ranges,
            loss_sum: progress.loss_sum,
            records: progress.records,
            compute_us: progress.compute_us,
            times: job::StepTimes::default(),
            steps_skipped: progress.steps_skipped,
        }),
        Report::Evaluated { step, records, means } => {
            let metrics = means.into_iter().map(|(name, mean)| (name, Some(mean))).collect();
            FromWorker::Evaluated(job::Evaluated { step, records, metrics })
        }
        Report::Formed { generation, step, ledger } => {
            FromWorker::Formed { generation, step, ledger: ledger_report(&ledger) }
        }
        Report::Holding { step, ranges } => FromWorker::Holding { step, ranges },
        Report::LeaseRequest { epoch, records } => FromWorker::LeaseRequest { epoch, records },
        Report::Primed { step } => FromWorker::Primed { step },
    }
}

const TALK_PAUSE_US: Micros = 5000;
