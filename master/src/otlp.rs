//! OpenTelemetry: what a job has done, as spans that a collector gets by OTLP.
//!
//! Each membership change, checkpoint, evaluation and sampled step is a trace. It is complete
//! within seconds, as stores and tail samplers of traces expect; the trace of a job, or of a
//! generation, would be open for days, and its root would arrive last. Each trace links to the
//! change that began its generation, and that to the change before it, also if another master has
//! exported it: ids derive from the run.
//!
//! The standard variables configure the export, as the crates of OpenTelemetry read them.
//!
//! **Invariant:** no error of the collector affects the job, which says it once. The spans that
//! wait for it are limited, and so is the time for which the end of the job is delayed.

use std::collections::VecDeque;
use std::time::{Duration, SystemTime};

use elasticdl_proto::{CheckpointTimes, Generation, MembershipChange, RankStep, WorkerId};
use opentelemetry::trace::{
    Link, SpanContext, SpanId, SpanKind, Status, TraceFlags, TraceId, TraceState,
};
use opentelemetry::{InstrumentationScope, KeyValue, Value};
use opentelemetry_otlp::SpanExporter;
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::error::OTelSdkError;
use opentelemetry_sdk::resource::EnvResourceDetector;
use opentelemetry_sdk::trace::{
    Config, SamplingDecision, ShouldSample, SpanData, SpanEvents, SpanExporter as _, SpanLinks,
};
use tokio::sync::{mpsc, watch};
use tracing::{info, warn};
use xxhash_rust::xxh3::{xxh3_64, xxh3_128};

use crate::job::{Event, Interval, Snapshot, Traced};
use crate::mlflow::{SEND_INTERVAL, wait};

/// The export of a job's spans.
#[derive(Debug)]
pub(crate) struct Traces {
    exporter: SpanExporter,
    sampler: Box<dyn ShouldSample>,
    /// Where the collector is, without credentials.
    address: String,
    /// Value of `service.name`, unless `OTEL_RESOURCE_ATTRIBUTES` has one.
    service: String,
    /// Spans that the collector does not have yet.
    waiting: VecDeque<SpanData>,
    /// Number of the newest interval that was taken.
    taken: u64,
    /// The job's time 0.
    zero: Option<SystemTime>,
    run_id: Option<String>,
}

impl Traces {
    /// Reads the variables; `None` if they name no collector, or turn the export off.
    ///
    /// # Errors
    /// A variable has a value that can't be used.
    pub(crate) fn read(variable: impl Fn(&str) -> Option<String>) -> Result<Option<Self>, String> {
        let variable = |name: &str| variable(name).filter(|text| !text.is_empty());
        let endpoint = ["OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT"];
        let Some(endpoint) = endpoint.into_iter().find_map(variable) else { return Ok(None) };
        let is_disabled =
            variable("OTEL_SDK_DISABLED").is_some_and(|text| text.eq_ignore_ascii_case("true"));
        if is_disabled || variable("OTEL_TRACES_EXPORTER").is_some_and(|name| name != "otlp") {
            return Ok(None);
        }
        // Fails if the process has a provider already, which is used then.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let exporter = SpanExporter::builder().build().map_err(|error| error.to_string())?;
        let url = reqwest::Url::parse(&endpoint).ok();
        let host =
            url.as_ref().and_then(|url| Some((url.host_str()?, url.port_or_known_default())));
        let address = host.map(|(host, port)| match port {
            Some(port) => format!("{host}:{port}"),
            None => host.to_owned(),
        });
        Ok(Some(Self {
            exporter,
            sampler: Config::default().sampler,
            address: address.unwrap_or(endpoint),
            service: variable("OTEL_SERVICE_NAME").unwrap_or_else(|| "elasticdl".into()),
            waiting: VecDeque::new(),
            taken: 0,
            zero: None,
            run_id: None,
        }))
    }

    /// Takes the spans that a snapshot adds. The oldest are dropped if too many wait.
    fn take(&mut self, snapshot: &Snapshot) {
        // A snapshot is some time old. The job's clock may stand still meanwhile.
        let zero = SystemTime::now().checked_sub(snapshot.at.0).unwrap_or(SystemTime::UNIX_EPOCH);
        let is_as_known = |known: SystemTime| zero >= known && zero <= known + CLOCK_SKEW_MAX;
        let zero = self.zero.filter(|known| is_as_known(*known)).unwrap_or(zero);
        self.zero = Some(zero);
        if self.run_id.is_none() {
            self.run_id = Some(snapshot.status.run_id.clone());
            self.exporter.set_resource(&self.resource(&snapshot.status.job));
        }
        let known = snapshot.traced.partition_point(|interval| interval.number <= self.taken);
        for interval in snapshot.traced.range(known..) {
            self.taken = interval.number;
            let spans = self.spans(interval, zero);
            self.waiting.extend(spans);
        }
        let surplus = self.waiting.len().saturating_sub(SPANS_MAX);
        self.waiting.drain(..surplus);
    }

    fn resource(&self, job: &str) -> Resource {
        Resource::builder_empty()
            .with_service_name(self.service.clone())
            .with_detector(Box::new(EnvResourceDetector::new()))
            .with_attributes([
                KeyValue::new("elasticdl.job", job.to_owned()),
                KeyValue::new("elasticdl.run_id", self.run_id.clone().unwrap_or_default()),
            ])
            .build()
    }

    /// The trace of an interval, if it is sampled: its root, and a span for each part.
    fn spans(&self, interval: &Interval, zero: SystemTime) -> Vec<SpanData> {
        let Interval { end, took, generation, what, .. } = interval;
        let root = self.context(*generation, what);
        let (name, mut attributes, parts) = describe(what, *took);
        attributes.push(KeyValue::new("elasticdl.generation", number(generation.0)));
        let kind = SpanKind::Internal;
        let trace = root.trace_id();
        let sampled =
            self.sampler.should_sample(None, trace, name, &kind, &attributes, &[]).decision;
        if sampled != SamplingDecision::RecordAndSample {
            return Vec::new();
        }
        let mut links = SpanLinks::default();
        let change = match what {
            Traced::Membership(_) => Generation(generation.0.saturating_sub(1)),
            _ => *generation,
        };
        if change > Generation::default() {
            links.links.push(Link::with_context(self.context_of_change(change)));
        }
        let end = zero + end.0;
        let start = end.checked_sub(*took).unwrap_or(end);
        let span = |name, id, parent, (from, to): (Duration, Duration), attributes| SpanData {
            span_context: context(trace, id),
            parent_span_id: parent,
            parent_span_is_remote: false,
            span_kind: kind.clone(),
            name,
            start_time: start + from,
            end_time: start + to,
            attributes,
            dropped_attributes_count: 0,
            events: SpanEvents::default(),
            links: SpanLinks::default(),
            status: Status::Unset,
            instrumentation_scope: InstrumentationScope::builder("elasticdl").build(),
        };
        let whole = (Duration::ZERO, *took);
        let root_id = root.span_id();
        let mut spans = vec![SpanData {
            links,
            ..span(name.into(), root_id, SpanId::INVALID, whole, attributes)
        }];
        spans.extend((1..).zip(parts).map(|(index, Part { name, from, took, attributes })| {
            span(name.into(), span_id(trace, index), root_id, (from, from + took), attributes)
        }));
        spans
    }

    /// Trace and span of what a job did in a generation.
    fn context(&self, generation: Generation, what: &Traced) -> SpanContext {
        let (kind, step) = match what {
            Traced::Checkpoint { step, .. } => ("checkpoint", *step),
            Traced::Evaluation(evaluated) => ("evaluation", evaluated.step),
            Traced::Membership(_) => return self.context_of_change(generation),
            Traced::Step { step, .. } => ("step", *step),
        };
        self.derived(&format!("{kind} {generation} {step}"))
    }

    fn context_of_change(&self, generation: Generation) -> SpanContext {
        self.derived(&format!("membership {generation}"))
    }

    fn derived(&self, what: &str) -> SpanContext {
        let run_id = self.run_id.as_deref().unwrap_or_default();
        let trace = TraceId::from(xxh3_128(format!("{run_id} {what}").as_bytes()));
        context(trace, span_id(trace, 0))
    }

    /// Sends the spans, and removes those that the collector has.
    async fn send(&mut self) -> Result<(), String> {
        while !self.waiting.is_empty() {
            let batch: Vec<SpanData> = self.waiting.iter().take(BATCH_MAX).cloned().collect();
            let sent = batch.len();
            let exported = tokio::time::timeout(SEND_TIMEOUT, self.exporter.export(batch)).await;
            match exported {
                Ok(Ok(())) => {}
                Ok(Err(OTelSdkError::InternalFailure(error))) => return Err(self.error(&error)),
                Ok(Err(error)) => return Err(self.error(&error.to_string())),
                Err(_) => return Err(self.error(NO_ANSWER)),
            }
            self.waiting.drain(..sent);
        }
        Ok(())
    }

    fn error(&self, what: &str) -> String {
        format!("{}: {what}", self.address)
    }

    /// Returns the error of the last attempt.
    async fn send_until_end(
        &mut self,
        known: &mut watch::Receiver<Option<Snapshot>>,
        news: &mpsc::Sender<Event>,
    ) -> Option<String> {
        let mut is_told = false;
        loop {
            let is_open = wait(known, SEND_INTERVAL).await;
            let snapshot = known.borrow_and_update().clone();
            snapshot.iter().for_each(|snapshot| self.take(snapshot));
            let error = self.send().await.err();
            if !is_open {
                return error;
            }
            if error.is_some() != is_told {
                match &error {
                    Some(error) => warn!(error, "the collector does not take the job's traces"),
                    None => info!("the collector takes the job's traces again"),
                }
                let _ = news.try_send(Event::Traced { error: error.clone() });
            }
            is_told = error.is_some();
        }
    }
}

/// Sends the spans of a job to the collector until the job ends. `news` gets the first of several
/// failures, and the first success after it. Returns why the collector does not have all.
pub(crate) async fn follow(
    mut traces: Traces,
    mut known: watch::Receiver<Option<Snapshot>>,
    news: mpsc::Sender<Event>,
) -> Option<String> {
    let mut ends = known.clone();
    let late = async move {
        while ends.changed().await.is_ok() {}
        tokio::time::sleep(END_TIMEOUT).await;
    };
    tokio::select! {
        error = traces.send_until_end(&mut known, &news) => error,
        () = late => Some(traces.error(NO_ANSWER)),
    }
}

/// A part of an interval.
#[derive(Debug)]
struct Part {
    name: &'static str,
    /// Since the interval's start.
    from: Duration,
    took: Duration,
    attributes: Vec<KeyValue>,
}

/// Name, attributes and parts of an interval that took so long.
fn describe(what: &Traced, took: Duration) -> (&'static str, Vec<KeyValue>, Vec<Part>) {
    match what {
        Traced::Checkpoint { step, name, bytes, worker, times } => {
            let CheckpointTimes { copy_us, write_us, publish_us } = *times;
            let parts = [("copy", copy_us), ("write", write_us), ("publish", publish_us)];
            let attributes = vec![
                KeyValue::new("elasticdl.step", number(*step)),
                KeyValue::new("elasticdl.checkpoint", name.clone()),
                KeyValue::new("elasticdl.bytes", number(*bytes)),
                KeyValue::new("elasticdl.worker", number(worker.0)),
            ];
            let parts = parts.map(|(name, us)| (name, Duration::from_micros(us)));
            ("checkpoint", attributes, in_sequence(parts))
        }
        Traced::Evaluation(evaluated) => {
            let mut attributes = vec![
                KeyValue::new("elasticdl.step", number(evaluated.step)),
                KeyValue::new("elasticdl.records", number(evaluated.records)),
            ];
            let known = evaluated.metrics.iter().filter_map(|(name, mean)| Some((name, (*mean)?)));
            attributes.extend(
                known.take(LISTED_MAX).map(|(name, mean)| {
                    KeyValue::new(format!("elasticdl.validation.{name}"), mean)
                }),
            );
            ("evaluation", attributes, Vec::new())
        }
        Traced::Membership(change) => {
            let phases = change.phases().map(|(name, ms)| {
                (name, Duration::from_secs_f64(ms.unwrap_or_default().max(0.0) / 1000.0))
            });
            let is_timed = change.gap_ms.is_some();
            let parts = if is_timed { in_sequence(phases) } else { Vec::new() };
            ("membership change", attributes_of(change), parts)
        }
        Traced::Step { step, reduce, ranks } => {
            let attributes = vec![
                KeyValue::new("elasticdl.step", number(*step)),
                KeyValue::new("elasticdl.all_reduce_ms", millis(*reduce)),
            ];
            let part = |(worker, rank): &(WorkerId, RankStep)| {
                let RankStep { records, compute_us, input_us, .. } = *rank;
                let (input, compute) =
                    (Duration::from_micros(input_us), Duration::from_micros(compute_us));
                Part {
                    name: "worker",
                    from: Duration::ZERO,
                    took: (input + compute).min(took),
                    attributes: vec![
                        KeyValue::new("elasticdl.worker", number(worker.0)),
                        KeyValue::new("elasticdl.records", number(records)),
                        KeyValue::new("elasticdl.input_ms", millis(input)),
                        KeyValue::new("elasticdl.compute_ms", millis(compute)),
                    ],
                }
            };
            ("step", attributes, ranks.iter().map(part).collect())
        }
    }
}

fn attributes_of(change: &MembershipChange) -> Vec<KeyValue> {
    let mut attributes = vec![
        KeyValue::new("elasticdl.cause", change.cause.name()),
        KeyValue::new("elasticdl.world_size", i64::from(change.world_size)),
        KeyValue::new("elasticdl.step", number(change.at_step)),
    ];
    for (name, workers) in change.workers().into_iter().filter(|(_, named)| !named.is_empty()) {
        let listed = workers.iter().take(LISTED_MAX).map(|worker| number(worker.0)).collect();
        let list = Value::Array(opentelemetry::Array::I64(listed));
        attributes.push(KeyValue::new(format!("elasticdl.workers.{name}"), list));
    }
    attributes
}

/// Parts that follow each other.
fn in_sequence<const N: usize>(parts: [(&'static str, Duration); N]) -> Vec<Part> {
    let mut from = Duration::ZERO;
    let part = |(name, took)| {
        let part = Part { name, from, took, attributes: Vec::new() };
        from += took;
        part
    };
    parts.into_iter().map(part).collect()
}

fn context(trace: TraceId, span: SpanId) -> SpanContext {
    SpanContext::new(trace, span, TraceFlags::SAMPLED, false, TraceState::default())
}

/// Id of a span of a trace: 0 is the root.
fn span_id(trace: TraceId, index: u64) -> SpanId {
    SpanId::from(xxh3_64(&[trace.to_bytes().as_slice(), &index.to_le_bytes()].concat()))
}

fn number(value: u64) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}

fn millis(span: Duration) -> f64 {
    span.as_secs_f64() * 1000.0
}

const NO_ANSWER: &str = "no answer in time";
/// Spans of a request.
const BATCH_MAX: usize = 512;
/// A snapshot is not older, unless the job's clock has stood still.
const CLOCK_SKEW_MAX: Duration = Duration::from_secs(1);
/// Time that the end of a job may be delayed by a collector that does not answer.
const END_TIMEOUT: Duration = Duration::from_secs(5);
/// Workers, and metrics, that a span names.
const LISTED_MAX: usize = 32;
const SEND_TIMEOUT: Duration = Duration::from_secs(30);
/// Spans that wait for a collector.
const SPANS_MAX: usize = 2048;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::job::testing::spec;
    use crate::job::{Job, Time};

    /// A job that has made these steps.
    fn snapshot(steps: std::ops::RangeInclusive<u64>) -> Snapshot {
        let seconds = Duration::from_secs;
        let mut snapshot = Job::new(spec()).snapshot(Time(seconds(3000)));
        let rank = (WorkerId(1), RankStep { compute_us: 2000, ..RankStep::default() });
        let interval = |number| Interval {
            number,
            end: Time(seconds(number)),
            took: Duration::from_millis(3),
            generation: Generation(2),
            what: Traced::Step { step: number, reduce: Duration::ZERO, ranks: vec![rank] },
        };
        snapshot.traced = std::sync::Arc::new(steps.map(interval).collect());
        snapshot
    }

    fn traces() -> Traces {
        let endpoint = |name: &str| {
            (name == "OTEL_EXPORTER_OTLP_ENDPOINT").then(|| "http://u:p@127.0.0.1:1/x".to_owned())
        };
        Traces::read(endpoint).unwrap().unwrap()
    }

    fn steps(traces: &Traces) -> Vec<SystemTime> {
        let roots = traces.waiting.iter().filter(|span| span.parent_span_id == SpanId::INVALID);
        roots.map(|span| span.end_time).collect()
    }

    #[tokio::test]
    async fn each_interval_is_taken_once_and_the_oldest_spans_are_dropped() {
        let mut traces = traces();
        assert_eq!(traces.address, "127.0.0.1:1", "without credentials");
        traces.take(&snapshot(1..=256));
        traces.take(&snapshot(200..=300));
        assert_eq!((traces.waiting.len(), steps(&traces).len()), (600, 300));
        for first in (301..=3000).step_by(100) {
            traces.take(&snapshot(first..=first + 99));
        }
        let ends = steps(&traces);
        assert_eq!((traces.waiting.len(), ends.len()), (SPANS_MAX, SPANS_MAX / 2));
        let age = ends[ends.len() - 1].duration_since(ends[0]).unwrap();
        assert_eq!(age, Duration::from_secs(SPANS_MAX as u64 / 2 - 1), "the newest");
    }

    #[tokio::test]
    async fn spans_of_another_master_of_the_run_have_the_same_ids() {
        let (mut first, mut second) = (traces(), traces());
        first.take(&snapshot(1..=3));
        second.take(&snapshot(3..=3));
        let ids = |traces: &Traces| {
            let spans = traces.waiting.iter().rev().take(2);
            spans.map(|span| span.span_context.clone()).collect::<Vec<_>>()
        };
        assert_eq!(ids(&first), ids(&second));
        let all: std::collections::BTreeSet<_> =
            first.waiting.iter().map(|span| span.span_context.span_id().to_bytes()).collect();
        assert_eq!(all.len(), 6);
    }
}
