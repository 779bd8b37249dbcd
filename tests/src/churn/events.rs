//! Events of one kind in one job, and their cost for the workers that they do not hit.

use std::error::Error;
use std::path::Path;
use std::time::Duration;

use clap::ValueEnum;
use elasticdl_proto::{Cause, MembershipChange};
use rustix::process::Signal;
use serde_json::{Map, Value, json};

use super::bench::{Bench, DisturbedEnded, DisturbedJob};
use super::event_log::{EventLog, now};
use crate::{quantile, send, spread};

/// What happens to workers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
#[expect(missing_docs, reason = "the other names say it")]
pub enum Kind {
    All,
    /// The packets that its host sends are dropped; it receives those of others.
    HalfOpen,
    /// The thread that computes hangs; the worker's other threads go on.
    Hang,
    /// Its host is switched off: packets are dropped in both directions, and no link is closed.
    Host,
    Join,
    Kill,
    Leave,
    Stop,
}

impl Kind {
    /// Its name in a result.
    pub fn name(self) -> &'static str {
        match self {
            Self::All => "all",
            Self::HalfOpen => "half-open",
            Self::Hang => "hang",
            Self::Host => "host",
            Self::Join => "join",
            Self::Kill => "kill",
            Self::Leave => "leave",
            Self::Stop => "stop",
        }
    }

    /// Whether each worker is on a host of its own.
    fn needs_hosts(self) -> bool {
        matches!(self, Self::HalfOpen | Self::Host)
    }
}

/// The cost of the events of one kind. A gap is the time between two commits of one worker, for the
/// worker that waited longest, less the median step. All times are in milliseconds.
#[derive(Debug, Default)]
pub struct Measured {
    /// Median time between two commits while no event happens; of several jobs, the mean.
    pub median_step: f64,
    /// For each event, the gap of the survivors; for a join, the time from the joiner's start until
    /// it contributes.
    pub gaps: Vec<f64>,
    /// The longest gap in an equally long time just before each event: the effect of the machine's
    /// other work.
    pub quiet: Vec<f64>,
    /// The gap when the replacement joins the group; for a join, the gap of the regroup alone.
    pub switches: Vec<f64>,
    /// Time from each joiner's start until a step with its own records was committed.
    pub latencies: Vec<f64>,
    /// For each event that takes a worker away, the time from it to the first commit of the group
    /// without that worker.
    pub recoveries: Vec<f64>,
    /// For each of these events, the time from it until all workers contribute again.
    pub full_strength: Vec<f64>,
    /// See [`DisturbedEnded::steps_lost`].
    pub steps_lost: usize,
    /// See [`DisturbedEnded::records_lost_and_repeated`].
    pub records_lost: u64,
    /// As above.
    pub records_repeated: u64,
    /// Parts of the gaps of the events, as the workers reported them to the master.
    phases: Phases,
    /// Parts of the gaps of the joiners' regroups.
    switch_phases: Phases,
}

/// Parts of gaps, over all events: one list for each of [`PHASES`].
type Phases = [Vec<f64>; PHASES.len()];

/// Names of the parts in the summary, without `_ms`.
const PHASES: [&str; 5] = ["detect", "agree", "connect", "state", "first_step"];

struct Event {
    at: Duration,
    /// Time at which all members that the job wants contribute again.
    until: Duration,
    victim: Option<u32>,
}

/// Starts a job in `folder` and [disturbs](disturb_running) it.
pub fn disturb(
    job: &DisturbedJob,
    (kind, count): (Kind, u32),
    folder: &Path,
) -> Result<Measured, Box<dyn Error>> {
    let launches = job.workers + count + LAUNCHES_SPARE;
    let bench = Bench::start(job, folder, kind.needs_hosts().then_some(launches))?;
    disturb_running(bench, (kind, count))
}

/// Disturbs a job `count` times, each time when it is complete and at rest, and stops it.
pub fn disturb_running(
    mut bench: Bench,
    (kind, count): (Kind, u32),
) -> Result<Measured, Box<dyn Error>> {
    let mut events = Vec::new();
    for _ in 0..count {
        events.push(cause(&mut bench, kind)?);
        if kind == Kind::Join {
            bench.scale(0);
        }
        bench.settle()?;
    }
    let ended = bench.stop()?;
    let (records_lost, records_repeated) = ended.records_lost_and_repeated()?;
    // What a process that was killed or stopped had computed is its own loss, not a survivor's.
    let disturbed: Vec<u32> = match kind {
        Kind::All | Kind::Join | Kind::Leave => Vec::new(),
        _ => events.iter().filter_map(|event| event.victim).collect(),
    };
    let steps_lost = ended.steps_lost(&disturbed);
    let median_step = median_step(&ended, &events);
    let mut measured =
        Measured { median_step, steps_lost, records_lost, records_repeated, ..Measured::default() };
    let mut before = Duration::ZERO;
    for event in &events {
        measured.take(kind, &ended, event, before)?;
        before = event.until;
    }
    Ok(measured)
}

/// Causes one event and waits until the group is complete again.
fn cause(bench: &mut Bench, kind: Kind) -> Result<Event, Box<dyn Error>> {
    let at = now();
    let victim = match kind {
        Kind::All | Kind::Join => {
            bench.scale(1);
            None
        }
        Kind::Kill => Some(bench.signal(Signal::KILL)?),
        Kind::Leave => Some(bench.signal(Signal::TERM)?),
        Kind::Stop => Some(bench.signal(Signal::STOP)?),
        Kind::Hang => Some(bench.hang()?),
        Kind::HalfOpen | Kind::Host => Some(bench.switch_off(kind == Kind::HalfOpen)?),
    };
    bench.wait_joiner(at)?;
    if let Some(victim) = victim {
        if kind.needs_hosts() {
            // It goes on, as far as it can.
            send(victim, Signal::KILL);
        }
        bench.wait_gone(victim)?;
        bench.wait_joiner(at)?;
        bench.wait_whole()?;
    }
    let joiners = bench.logs.all.values().filter(|log| log.is_new(at));
    let until = joiners.filter_map(EventLog::contribution).map(|(at, _)| at).max().unwrap_or(at);
    Ok(Event { at, until, victim })
}

impl Measured {
    /// Adds the events of another job.
    pub fn add(&mut self, other: Self) {
        let events = (self.gaps.len() as f64, other.gaps.len() as f64);
        self.median_step = (self.median_step * events.0 + other.median_step * events.1)
            / (events.0 + events.1).max(1.0);
        self.gaps.extend(other.gaps);
        self.quiet.extend(other.quiet);
        self.switches.extend(other.switches);
        self.latencies.extend(other.latencies);
        self.recoveries.extend(other.recoveries);
        self.full_strength.extend(other.full_strength);
        self.steps_lost += other.steps_lost;
        self.records_lost += other.records_lost;
        self.records_repeated += other.records_repeated;
        for (own, others) in
            [(&mut self.phases, other.phases), (&mut self.switch_phases, other.switch_phases)]
        {
            own.iter_mut().zip(others).for_each(|(own, others)| own.extend(others));
        }
    }

    /// The figures as an object.
    pub fn json(&self) -> Value {
        let parts = |phases: &Phases| {
            let parts = phases.iter().zip(PHASES);
            parts
                .map(|(values, name)| (name.to_owned(), json!(quantile(&mut values.clone(), 0.5))))
                .collect::<Map<_, _>>()
        };
        let mut gaps = self.gaps.clone();
        json!({
            "events": gaps.len(),
            "p50_ms": quantile(&mut gaps, 0.5),
            "p99_ms": quantile(&mut gaps, 0.99),
            "max_ms": quantile(&mut gaps, 1.0),
            "steps_lost": self.steps_lost,
            "median_step_ms": self.median_step,
            "before_ms": spread(&mut self.quiet.clone()),
            "switch_ms": spread(&mut self.switches.clone()),
            "latency_ms": spread(&mut self.latencies.clone()),
            "full_strength_ms": spread(&mut self.full_strength.clone()),
            "phases_p50_ms": parts(&self.phases),
            "switch_phases_p50_ms": parts(&self.switch_phases),
        })
    }

    fn take(
        &mut self,
        kind: Kind,
        ended: &DisturbedEnded,
        event: &Event,
        before: Duration,
    ) -> Result<(), Box<dyn Error>> {
        let survivors: Vec<&EventLog> = survivors(ended, event).collect();
        let first = survivors.first().ok_or("an event without survivors")?;
        let joiners = ended.logs.all.values().filter_map(|log| {
            let (at, commit) = log.contribution()?;
            (event.at < at && at <= event.until).then_some((log.born, at, commit.step))
        });
        let joiners: Vec<(Duration, Duration, u64)> = joiners.collect();
        self.latencies.extend(joiners.iter().map(|(born, at, _)| ms(*at - *born)));
        let joined_by =
            joiners.iter().map(|(.., step)| *step).max().ok_or("an event without a joiner")?;
        // The generations that the event led to, each with its first step.
        let steps = first.steps_before(event.at)..=joined_by;
        let records: Vec<(u64, &MembershipChange)> = ended
            .summary
            .memberships
            .iter()
            .filter(|record| record.cause != Cause::Start && steps.contains(&record.at_step))
            .map(|record| (record.at_step, record))
            .collect();
        let is_join = |record: &MembershipChange| record.cause == Cause::Join;
        let last = |join: bool| records.iter().rfind(|(_, record)| is_join(record) == join);
        let switch = last(true);
        let (from, to) = match kind {
            // The whole time that the survivors notice the joiner, its start and preparation
            // included.
            Kind::All | Kind::Join => {
                (joiners.iter().map(|(born, ..)| *born).min().unwrap_or(event.at), joined_by)
            }
            _ => (event.at, last(false).ok_or("an event without a generation")?.0),
        };
        let longest = |from: Duration, to: Duration| {
            let gaps = survivors.iter().flat_map(|log| gaps(log, from, to));
            (gaps.map(ms).fold(0.0, f64::max) - self.median_step).max(0.0)
        };
        let time_of = |step: u64| survivors.iter().filter_map(|log| log.time_of(step)).max();
        let to = time_of(to).ok_or("a generation without a step")?;
        self.gaps.push(longest(from, to));
        if event.victim.is_some() {
            self.recoveries.push(ms(to.saturating_sub(event.at)));
            self.full_strength.push(ms(event.until - event.at));
        }
        if let Some((step, record)) = switch {
            // The generation of a join is that of the two commits around it; that of another event
            // lasts until the joiner contributes.
            let after =
                time_of(step.saturating_sub(1)).filter(|_| kind == Kind::Join).unwrap_or(to);
            self.switches.push(longest(after, event.until));
            take_phases(&mut self.switch_phases, record);
        }
        if let Some((_, record)) = last(false).or(switch) {
            take_phases(&mut self.phases, record);
        }
        let quiet_from = event.at.saturating_sub(to.saturating_sub(from)).max(before);
        self.quiet.push(longest(quiet_from, event.at));
        Ok(())
    }
}

fn take_phases(phases: &mut Phases, record: &MembershipChange) {
    let ms = [
        record.detect_ms,
        record.agree_ms,
        record.connect_ms,
        record.state_ms,
        record.first_step_ms,
    ];
    phases.iter_mut().zip(ms).for_each(|(values, ms)| values.extend(ms));
}

/// Workers that were members before the event and after.
fn survivors<'a>(ended: &'a DisturbedEnded, event: &Event) -> impl Iterator<Item = &'a EventLog> {
    let (at, until, victim) = (event.at, event.until, event.victim);
    let all = ended.logs.all.values().filter(move |log| Some(log.pid) != victim);
    all.filter(move |log| {
        log.contribution().is_some_and(|(first, _)| first < at)
            && log.commits.last().is_some_and(|(last, _)| *last >= until)
    })
}

/// Times between successive commits of this worker, where the later one lies after `from` and not
/// after `to`.
fn gaps(log: &EventLog, from: Duration, to: Duration) -> impl Iterator<Item = Duration> {
    let pairs = log.commits.windows(2);
    pairs.filter(move |pair| pair[1].0 > from && pair[1].0 <= to).map(|pair| pair[1].0 - pair[0].0)
}

/// Median time of a step while no event happens, in milliseconds.
fn median_step(ended: &DisturbedEnded, events: &[Event]) -> f64 {
    let starts = std::iter::once(Duration::ZERO).chain(events.iter().map(|event| event.until));
    let ends = events.iter().map(|event| event.at);
    let quiet: Vec<(Duration, Duration)> = starts.zip(ends).collect();
    let mut steps = Vec::new();
    for log in ended.logs.all.values() {
        let Some((first, _)) = log.contribution() else { continue };
        for (from, to) in &quiet {
            steps.extend(gaps(log, first.max(*from), *to).map(ms));
        }
    }
    quantile(&mut steps, 0.5)
}

fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

/// Launches that a job makes at most beside those of its workers and of their replacements.
const LAUNCHES_SPARE: u32 = 8;
