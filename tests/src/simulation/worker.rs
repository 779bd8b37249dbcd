//! The trainer thread of a worker: the shipped trainer, and what it does before its first
//! membership.

use std::cell::Cell;
use std::num::NonZeroU64;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::mpsc::Receiver;
use std::time::{Duration, Instant};

use elasticdl::machine::Completion;
use elasticdl::session::audit::AuditPlan;
use elasticdl::session::evaluation::{BLOCK_RECORDS, Evaluation, Plan};
use elasticdl::session::halt::Ending;
use elasticdl::session::header::StepHeader;
use elasticdl::session::origin::Origin;
use elasticdl::session::plan::StepSize;
use elasticdl::session::transport_switch::NcclObstacle;
use elasticdl::session::{Exit, JobPlan, Session, State};
use elasticdl::simulated::{
    Chunks, ControlEvent, Owned, Parts, Placement, ReplacedRows, Settings, SimulatedTrainer,
    receive,
};
use elasticdl_master::job::OnRowsLost;
use elasticdl_proto::{FileList, Generation, MasterMessage, WorkerId, WorkerMessage};
use tokio::sync::mpsc::UnboundedSender;

use super::coroutine::{act, act_and_wait};
use super::machine::{SimulatedCheckpoints, SimulatedLinks, SimulatedMachine, SimulatedRecords};
use super::model::{count, counts, digest, flipped};
use super::oracles::{check_evaluated, check_order, check_sum};
use super::program::Counting;
use super::rows::{EVICTED, Row, Rows};
use super::state::setting::Setting;
use super::state::thread::{Doing, StateRequest};
use super::state::trainer::Shared;
use super::timeless::Timeless;

/// What the trainer thread begins with.
pub(super) struct Worker {
    pub(super) setting: Rc<Setting>,
    pub(super) id: WorkerId,
    pub(super) origin: Origin,
    pub(super) inbox: Receiver<ControlEvent>,
    pub(super) outbox: UnboundedSender<WorkerMessage>,
    pub(super) holds_state: Arc<AtomicBool>,
    pub(super) flips: Rc<Cell<Option<usize>>>,
    pub(super) is_auditing: Rc<Cell<bool>>,
    pub(super) requests: Shared<StateRequest>,
    pub(super) completions: Shared<Completion>,
    pub(super) is_unavailable: Rc<Cell<bool>>,
}

/// The results of one turn of the trainer.
#[derive(Debug, Default)]
pub(super) struct Turned {
    /// The state, if it may have changed.
    pub(super) changed: Option<Changed>,
    /// Generation and rank after the turn.
    pub(super) group: Option<(Generation, usize)>,
    /// Whether the work of the group has ended.
    pub(super) has_ended: bool,
    /// Whether the group has given its state up, as rows that belong to it are lost.
    pub(super) has_lost_rows: bool,
    /// The step that was committed.
    pub(super) commit: Option<Commit>,
    /// Set if a group has agreed on a state: why it builds no NCCL.
    pub(super) repaired: Option<Option<NcclObstacle>>,
    /// How the group's work has ended, if that was reported.
    pub(super) ended: Option<Ending>,
    /// A violation that was found.
    pub(super) wrong: Option<String>,
    /// The parameter of which a bit has flipped.
    pub(super) flipped: Option<usize>,
    /// The records of the step that was committed, as their parameters.
    pub(super) records: Vec<usize>,
    /// Rows that were lost and replaced by older ones.
    pub(super) replaced: Option<ReplacedRows>,
    /// The shards of tables, after a commit or a repair.
    pub(super) rows: Option<SeenRows>,
    /// The step of the optimizer's chunks and who holds which, after a commit or a repair.
    pub(super) chunks: Option<(u64, Placement)>,
    /// Whether a state was installed whose parameters are not here yet.
    pub(super) is_installed: bool,
    /// Whether the group broke after a commit, before the parameters were here.
    pub(super) is_not_gathered: bool,
    /// The step and its evaluation, if the state has just been evaluated.
    pub(super) evaluated: Option<(u64, Evaluation)>,
    /// What the trainer is, as a number, where a search wants to know it.
    pub(super) identity: u64,
}

/// The shards of a worker.
#[derive(Debug)]
pub(super) struct SeenRows {
    pub(super) step: u64,
    pub(super) placement: Placement,
    pub(super) rows: Rows,
}

impl SeenRows {
    fn of(owned: &Owned) -> Option<Self> {
        let (step, placement) = (owned.step()?, owned.placement()?.clone());
        let rows = owned.held_rows().map(|row| {
            let (touches, last_step) = (row.touches.into(), row.last_step.into());
            let numbers = row.numbers.to_vec();
            ((row.shard, row.table, row.id), Row { touches, last_step, numbers })
        });
        let evicted = owned.evicted().filter(|(.., touches)| *touches > 0);
        let evicted = evicted.map(|(shard, table, touches)| {
            ((shard, table, EVICTED), Row { touches, ..Row::default() })
        });
        Some(Self { step, placement, rows: Rows(rows.chain(evicted).collect(), Vec::new()) })
    }
}

#[derive(Debug)]
pub(super) struct Changed {
    pub(super) state: Option<State>,
    pub(super) parameters: Vec<u8>,
    pub(super) digest: u64,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Commit {
    /// `None`: on a joiner that follows its donor.
    pub(super) generation: Option<Generation>,
    /// Whether it was committed in a round, and not in a repair.
    pub(super) is_round: bool,
    /// Whether the rows of the step were looked up while the step before was computed.
    pub(super) is_foreseen: bool,
}

impl Worker {
    /// Runs until the trainer ends.
    pub(super) fn run(self) {
        let Self { setting, id, origin, inbox, outbox, flips, is_auditing, .. } = self;
        let serves_tables = origin.serves_tables;
        let exit = match prepare(&setting, &inbox, &outbox) {
            None => Ok(Exit::Shutdown(String::new())),
            Some(dataset) => {
                let updated = Rc::default();
                let session = session(&setting, id, origin, &dataset);
                let model = Counting {
                    parameters: setting.parameters(),
                    updated: Rc::clone(&updated),
                    has_tables: setting.tables.is_some(),
                    has_slots: setting.chunks.is_some(),
                };
                let parts = Parts {
                    session,
                    model,
                    records: Box::new(SimulatedRecords {
                        records: setting.records(),
                        is_unavailable: self.is_unavailable,
                    }),
                    links: Box::new(SimulatedLinks { requests: self.requests }),
                    checkpoints: Box::new(SimulatedCheckpoints {
                        is_written: setting.spec.options.checkpoints.is_some(),
                        completions: self.completions,
                    }),
                    machine: Arc::new(SimulatedMachine),
                    dataset,
                    dial_limit: DIAL_LIMIT,
                    part_floats: setting.parameters().div_ceil(PARTS),
                    evaluation: evaluation(&setting),
                    tables: (id, setting.tables.unwrap_or(NO_TABLES)),
                    chunks: setting.layout().zip(setting.chunks.map(|(_, bytes)| bytes)),
                    goes_on_with_older: setting.spec.options.on_rows_lost == OnRowsLost::Stale,
                };
                let trainer =
                    SimulatedTrainer::new(parts, &inbox, outbox.clone(), self.holds_state);
                let before = Before::default();
                let watched = Watched {
                    trainer,
                    setting,
                    serves_tables,
                    flips,
                    is_auditing,
                    updated,
                    before,
                };
                watched.run()
            }
        };
        if let Err(failure) = &exit {
            // The control thread learns of it before it is stopped.
            let _ = outbox.send(WorkerMessage::clone(failure));
        }
        act(move |world, thread| world.end_trainer(thread.p, &exit));
    }
}

/// Answers the master until the data set is known; `None`: the worker is shut down.
fn prepare(
    setting: &Setting,
    inbox: &Receiver<ControlEvent>,
    outbox: &UnboundedSender<WorkerMessage>,
) -> Option<FileList> {
    loop {
        let answer = match receive(&SimulatedMachine, inbox, Duration::MAX).ok()? {
            ControlEvent::Message(MasterMessage::Describe, _) => {
                build();
                let files = setting.files.iter().enumerate();
                let file = |(i, &records): (usize, &u64)| (format!("file-{i}"), records);
                WorkerMessage::Described(Ok(FileList::pack(files.map(file))), None)
            }
            ControlEvent::Message(MasterMessage::Prepare(dataset), _) => {
                build();
                return Some(dataset);
            }
            ControlEvent::Message(MasterMessage::Shutdown { .. }, _) => return None,
            ControlEvent::Message(..) => continue,
            ControlEvent::Reconnected => WorkerMessage::Reconnected { step: 0 },
        };
        // The control thread ends together with this one.
        let _ = outbox.send(answer);
    }
}

/// Describes a data set, or builds a model.
fn build() {
    act_and_wait(|world, thread| {
        let span = world.rng.between(100, world.setting.build_us);
        world.busy(thread, Doing::Busy, span);
    });
}

fn session(setting: &Setting, id: WorkerId, origin: Origin, dataset: &FileList) -> Session {
    let spec = &setting.spec;
    let plan = JobPlan {
        records: dataset.records(),
        epochs: spec.options.epochs,
        max_steps: spec.options.max_steps,
        size: StepSize {
            batch: spec.options.batch,
            micro_batch: spec.options.micro_batch.map_or(1, NonZeroU64::get),
        },
        checkpoints: spec.options.checkpoints.as_ref().map(|kept| kept.every),
        evaluation: evaluation(setting),
        skips_nonfinite: false,
        allows_mixed_builds: false,
        exports_best: spec.options.seed.is_multiple_of(2),
        has_tables: setting.tables.is_some(),
        shards_optimizer: setting.chunks.is_some(),
        audit: (spec.options.audit > 0).then_some(AuditPlan {
            seed: spec.options.seed,
            per_million: spec.options.audit,
            of_program: false,
        }),
    };
    let mut session = Session::new(id, plan).on_gpu(setting.gpus.is_some()).of(origin);
    session.ready(setting.parameters() as u64);
    session
}

/// When the model is evaluated: on two blocks of data.
fn evaluation(setting: &Setting) -> Option<Plan> {
    setting.spec.options.validation.as_ref().map(|spec| Plan {
        records: BLOCK_RECORDS + 1,
        every: spec.every,
        metric: spec.metric.clone(),
        highest: spec.highest,
        patience: spec.patience,
    })
}

/// A trainer whose turns are reported to the world.
struct Watched<'a> {
    trainer: SimulatedTrainer<'a, Counting>,
    setting: Rc<Setting>,
    serves_tables: bool,
    flips: Rc<Cell<Option<usize>>>,
    /// Whether the next gradient is audited.
    is_auditing: Rc<Cell<bool>>,
    /// The sum of the last update, if there was one in this turn.
    updated: Rc<Cell<Option<Vec<f32>>>>,
    before: Before,
}

/// The session before a turn.
#[derive(Debug, Default)]
struct Before {
    state: Option<State>,
    group: Option<(Generation, usize)>,
    in_round: bool,
    is_foreseen: bool,
    has_reported: bool,
    repaired_at: Option<Instant>,
    /// The parameters that the state stands for.
    parameters: Vec<f32>,
    /// Step and creation of the session's state, with its parameters or not.
    known: Option<(u64, u64)>,
}

impl Watched<'_> {
    fn run(mut self) -> Result<Exit, Box<WorkerMessage>> {
        loop {
            // The first one reports that the worker is ready.
            let turned = self.observe();
            act_and_wait(move |world, thread| world.turned(thread, turned));
            self.is_auditing.set(self.trainer.session().is_auditing());
            if let Some(exit) = self.trainer.turn()? {
                return Ok(exit);
            }
        }
    }

    /// Compares the trainer with what it was a turn ago.
    fn observe(&mut self) -> Turned {
        let Self { trainer, setting, serves_tables, flips, updated, before, .. } = self;
        let mut updated = updated.take();
        let repaired_at = trainer.repaired_at();
        let session = trainer.session();
        let (state, group) = (session.state(), session.group_rank());
        if setting.chunks.is_some() {
            updated = committed_sum(setting, before, session);
        }
        if trainer.has_parameters() {
            before.parameters = trainer.parameters().to_vec();
        } else if let Some(sum) = &updated {
            before.parameters.iter_mut().zip(sum).for_each(|(count, sum)| *count += sum);
        }
        let has_ended = session.ended().is_some();
        let mut turned = Turned { group, has_ended, ..Turned::default() };
        if let Some(sum) = &updated {
            let before_group = before.group;
            let generation = before_group.map(|(generation, _)| generation);
            let (is_round, is_foreseen) = (before.in_round, before.is_foreseen);
            turned.commit = Some(Commit { generation, is_round, is_foreseen });
            // A joiner may drop its state right after the step: a membership that arrived meanwhile
            // can follow another history than its donor's.
            let plan = evaluation(setting).filter(|_| before.in_round);
            if let (Some(before), Some(_)) = (&before.state, state) {
                let headers: &[StepHeader] = session.last_headers().unwrap_or_default();
                let rank = before_group.filter(|_| is_round).map(|(_, rank)| rank);
                let checked = check_sum(setting, headers, sum)
                    .and_then(|()| check_order(setting, before, headers))
                    .and_then(|()| check_role(*serves_tables, rank, headers))
                    .and_then(|()| check_evaluated(before, plan));
                turned.wrong = checked.err();
            }
        }
        if repaired_at.is_some() && repaired_at != before.repaired_at {
            turned.repaired = Some(session.nccl_obstacle());
        }
        if let Some(sum) = &updated {
            turned.records = (0..sum.len()).filter(|&record| sum[record] > 0.0).collect();
        }
        let is_repaired = turned.repaired.is_some();
        if updated.is_some() || is_repaired {
            turned.rows = trainer.rows().and_then(SeenRows::of);
        }
        if let Some(chunks) = trainer.chunks().filter(|_| updated.is_some() || is_repaired) {
            turned.chunks = chunks.step().zip(chunks.placement().cloned());
            // One that is behind in a repair, and has not kept the sums, gives up its chunks next.
            let are_behind = !before.in_round && chunks.step() != state.map(|state| state.step);
            let wrong = || wrong_chunk(chunks, &before.parameters).filter(|_| !are_behind);
            turned.wrong = turned.wrong.or_else(wrong);
            let is_gathered = trainer.has_parameters();
            turned.is_not_gathered = updated.is_some() && before.in_round && !is_gathered;
        }
        let has_reported = session.has_reported_end();
        if has_reported && !before.has_reported {
            turned.ended = session.ended().cloned();
        }
        let known = before.state.as_ref().map(|state| state.evaluation);
        let is_evaluated = known.is_some() && known != state.map(|state| state.evaluation);
        if updated.is_none() && is_evaluated {
            let is_own = |state: &&State| state.evaluation.at == state.step;
            turned.evaluated = state.filter(is_own).map(|state| (state.step, state.evaluation));
        }
        let is_other = state.map(|s| s.step) != before.state.as_ref().map(|s| s.step);
        // A state is one with its parameters, which come last.
        let is_whole = trainer.has_parameters();
        let is_other = is_other && (is_whole || state.is_none());
        let known = state.map(|state| (state.step, state.created));
        let is_new = known.is_some() && known != before.known;
        turned.is_installed = is_new && !is_whole && updated.is_none();
        before.known = known;
        let flips = flips.take().filter(|_| state.is_some());
        if updated.is_some() || is_other || is_evaluated || is_repaired || flips.is_some() {
            before.state = state.cloned();
            turned.changed =
                Some(Changed { state: state.cloned(), parameters: Vec::new(), digest: 0 });
        }
        (before.group, before.has_reported) = (group, has_reported);
        before.repaired_at = repaired_at;
        before.in_round = session.in_round().is_some();
        before.is_foreseen = session.assignment.is_foreseen();
        turned.flipped = flips;
        turned.has_lost_rows = trainer.has_lost_rows();
        turned.replaced = trainer.take_replaced_rows();
        if setting.is_explored {
            let rows = trainer.rows().map(|owned| (owned.header(), SeenRows::of(owned)));
            let chunks = trainer.chunks().map(|chunks| (chunks, trainer.has_parameters()));
            turned.identity = Timeless::number_of(&(trainer.session(), rows, chunks));
        }
        if let Some(parameter) = flips {
            trainer.edit_parameters(|all| all[parameter] = flipped(all[parameter]));
        }
        if let Some(changed) = &mut turned.changed {
            if setting.chunks.is_none() {
                before.parameters = trainer.parameters().to_vec();
            }
            changed.parameters = counts(&before.parameters);
            changed.digest = digest(&changed.parameters);
        }
        turned
    }
}

/// Checks that a table server has computed none of the records of a step that its group has made.
fn check_role(
    serves_tables: bool,
    rank: Option<usize>,
    headers: &[StepHeader],
) -> Result<(), String> {
    match rank.and_then(|rank| headers.get(rank)).map(|header| &header.ranges) {
        Some(ranges) if serves_tables && !ranges.is_empty() => {
            Err(format!("a table server has computed {ranges:?}"))
        }
        _ => Ok(()),
    }
}

/// The sum of the step that was committed since `before`, if one was, by its headers.
fn committed_sum(setting: &Setting, before: &Before, session: &Session) -> Option<Vec<f32>> {
    let (before, state) = before.state.as_ref().zip(session.state())?;
    if (before.step + 1, before.created) != (state.step, state.created) {
        return None;
    }
    let mut sum = vec![0.0; setting.parameters()];
    let headers = session.last_headers().unwrap_or_default();
    headers.iter().for_each(|header| count(&mut sum, &header.ranges, setting.records()));
    Some(sum)
}

/// What is wrong with the chunks of a rank whose state stands for these parameters.
fn wrong_chunk(chunks: &Chunks, parameters: &[f32]) -> Option<String> {
    let expected = |chunk: u32| &parameters[chunks.layout().range(chunk)];
    let (wrong, found) = chunks.slots().find(|&(chunk, slots)| slots != expected(chunk))?;
    let expected = expected(wrong);
    Some(format!("chunk {wrong} is {found:?}, not {expected:?}"))
}

const NO_TABLES: Settings =
    Settings { seed: 0, shards: 1, copies: 1, lag: 0, copy_bytes: 1, copy_rate: 0 };

/// Number of parts of a snapshot.
const PARTS: usize = 6;

/// Lower bound of the timeout for the dial of a donor, as shipped.
const DIAL_LIMIT: Duration = Duration::from_secs(2);
