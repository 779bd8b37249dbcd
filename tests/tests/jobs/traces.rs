//! A collector gets the traces of a job by OTLP: membership changes with what they cost, steps,
//! checkpoints and evaluations. One that is away, or does not answer, costs no step, and delays the
//! end for a short time.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use elasticdl_tests::{Ended, JobFixture, send};
use opentelemetry_proto::tonic::collector::trace::v1::trace_service_server::{
    TraceService, TraceServiceServer,
};
use opentelemetry_proto::tonic::collector::trace::v1::{
    ExportTraceServiceRequest, ExportTraceServiceResponse,
};
use opentelemetry_proto::tonic::common::v1::KeyValue;
use opentelemetry_proto::tonic::common::v1::any_value::Value;
use opentelemetry_proto::tonic::trace::v1::Span;
use prost::Message as _;
use rustix::process::Signal;
use tokio_stream::wrappers::TcpListenerStream;

use crate::PROGRAMS;

/// What a collector does with requests.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Conduct {
    Hangs,
    Refuses,
    Takes,
}

/// A collector on loopback.
#[derive(Clone)]
struct Collector {
    port: u16,
    conduct: Arc<Mutex<Conduct>>,
    taken: Arc<Mutex<Vec<ExportTraceServiceRequest>>>,
    /// Requests of any kind.
    heard: Arc<Mutex<Vec<String>>>,
}

impl Collector {
    /// One for protobuf over HTTP.
    fn start(conduct: Conduct) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let collector = Self::at(listener.local_addr().unwrap().port(), conduct);
        let serving = collector.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let collector = serving.clone();
                std::thread::spawn(move || collector.serve(stream.unwrap()));
            }
        });
        collector
    }

    fn at(port: u16, conduct: Conduct) -> Self {
        let (taken, heard) = Default::default();
        Self { port, conduct: Arc::new(Mutex::new(conduct)), taken, heard }
    }

    fn behave(&self, conduct: Conduct) {
        *self.conduct.lock().unwrap() = conduct;
    }

    /// Serves one connection until the client closes it.
    fn serve(&self, mut stream: TcpStream) {
        let mut reader = BufReader::new(stream.try_clone().unwrap());
        loop {
            let (mut head, mut length) = (String::new(), 0);
            while !head.ends_with("\r\n\r\n") {
                let start = head.len();
                if reader.read_line(&mut head).unwrap_or(0) == 0 {
                    return;
                }
                let line = head[start..].to_ascii_lowercase();
                length = line
                    .strip_prefix("content-length:")
                    .map_or(length, |text| text.trim().parse().unwrap());
            }
            let mut body = vec![0; length];
            reader.read_exact(&mut body).unwrap();
            self.heard.lock().unwrap().push(head);
            let conduct = *self.conduct.lock().unwrap();
            let status = match conduct {
                Conduct::Hangs => continue,
                Conduct::Refuses => "503 Service Unavailable",
                Conduct::Takes => {
                    let request = ExportTraceServiceRequest::decode(&body[..]).unwrap();
                    self.taken.lock().unwrap().push(request);
                    "200 OK"
                }
            };
            let answer = format!("HTTP/1.1 {status}\r\ncontent-length: 0\r\n\r\n");
            if stream.write_all(answer.as_bytes()).is_err() {
                return;
            }
        }
    }

    fn variables(&self) -> Vec<(&'static str, std::ffi::OsString)> {
        let address = format!("http://127.0.0.1:{}", self.port);
        vec![("OTEL_EXPORTER_OTLP_ENDPOINT", address.into())]
    }

    fn spans(&self) -> Vec<Span> {
        let taken = self.taken.lock().unwrap();
        let resources = taken.iter().flat_map(|request| &request.resource_spans);
        let scopes = resources.flat_map(|resource| &resource.scope_spans);
        scopes.flat_map(|scope| scope.spans.iter().cloned()).collect()
    }

    /// The attributes of the resource, which is the same in all requests.
    fn resource(&self) -> BTreeMap<String, Value> {
        let taken = self.taken.lock().unwrap();
        let mut all = taken.iter().flat_map(|request| &request.resource_spans);
        let first = all.next().unwrap().resource.clone().unwrap();
        assert!(all.all(|other| other.resource.as_ref() == Some(&first)));
        attributes(&first.attributes)
    }
}

#[tonic::async_trait]
impl TraceService for Collector {
    async fn export(
        &self,
        request: tonic::Request<ExportTraceServiceRequest>,
    ) -> Result<tonic::Response<ExportTraceServiceResponse>, tonic::Status> {
        self.taken.lock().unwrap().push(request.into_inner());
        Ok(tonic::Response::new(ExportTraceServiceResponse::default()))
    }
}

fn attributes(all: &[KeyValue]) -> BTreeMap<String, Value> {
    let value = |pair: &KeyValue| pair.value.clone().unwrap().value.unwrap();
    all.iter().map(|pair| (pair.key.clone(), value(pair))).collect()
}

fn number(span: &Span, key: &str) -> u64 {
    match attributes(&span.attributes).get(key) {
        Some(Value::IntValue(value)) => u64::try_from(*value).unwrap(),
        other => panic!("{key} of {span:?}: {other:?}"),
    }
}

fn took_ms(span: &Span) -> f64 {
    (span.end_time_unix_nano - span.start_time_unix_nano) as f64 / 1e6
}

fn named<'a>(spans: &'a [Span], name: &str) -> Vec<&'a Span> {
    spans.iter().filter(|span| span.name == name).collect()
}

/// Spans of the same trace below `root`, in the order of their starts.
fn parts<'a>(spans: &'a [Span], root: &Span) -> Vec<&'a Span> {
    let is_part = |span: &&Span| span.parent_span_id == root.span_id;
    let mut parts: Vec<_> = spans.iter().filter(is_part).collect();
    assert!(parts.iter().all(|part| part.trace_id == root.trace_id), "{root:?}");
    parts.sort_by_key(|part| part.start_time_unix_nano);
    parts
}

/// Lines of the console about traces.
fn lines_about_traces(ended: &Ended) -> Vec<&str> {
    ended.output.lines().filter(|line| line.contains("the job's traces")).collect()
}

#[test]
fn a_collector_gets_membership_changes_steps_checkpoints_and_evaluations() {
    let collector = Collector::start(Conduct::Takes);
    let mut variables = collector.variables();
    variables.push(("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=test".into()));
    variables.push(("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer%20key".into()));
    let fixture = JobFixture {
        epochs: 100_000,
        micros_per_record: 100,
        global_batch_size: 30,
        variables,
        ..JobFixture::new(PROGRAMS, 3)
    };
    let began = std::time::SystemTime::now();
    let mut job = fixture
        .command(0)
        .option("job-name", "traced")
        .option("checkpoint-dir", fixture.path("checkpoints"))
        .option("checkpoint-every", "20")
        .option("validation-data", fixture.data())
        .option("evaluate-every", "60")
        .start();
    job.wait_for_work_of(3);
    let (killed, pid) = job.workers().pop_last().unwrap();
    send(pid, Signal::KILL);
    job.wait_for("a loss, a join, an evaluation and a checkpoint", |status| {
        let changes = &status.memberships;
        let is_timed = changes.len() > 2 && changes[1..].iter().all(|c| c.gap_ms.is_some());
        is_timed && status.evaluated.is_some() && status.checkpoints.as_ref().unwrap().saved > 0
    });
    job.wait_for_next_step();
    // Members report what a change has cost within a second, or that is final.
    std::thread::sleep(Duration::from_secs(2));
    send(job.pid(), Signal::INT);
    let ended = job.wait();
    assert_eq!(ended.code, Some(130), "{}", ended.output);
    assert_eq!(lines_about_traces(&ended), [""; 0]);
    let (summary, spans) = (ended.summary(), collector.spans());
    let head = &collector.heard.lock().unwrap()[0];
    assert!(head.starts_with("POST /v1/traces ") && head.contains("Bearer key"), "{head}");

    let text = |text: &str| Value::StringValue(text.into());
    let expected = [
        ("deployment.environment.name", "test"),
        ("elasticdl.job", "traced"),
        ("elasticdl.run_id", &summary.run_id),
        ("service.name", "elasticdl"),
    ];
    assert_eq!(collector.resource(), expected.map(|(key, value)| (key.into(), text(value))).into());

    let ids: BTreeSet<_> = spans.iter().map(|span| (&span.trace_id, &span.span_id)).collect();
    assert_eq!(ids.len(), spans.len(), "each span arrives once");
    let now = began.elapsed().unwrap();
    let began = began.duration_since(std::time::UNIX_EPOCH).unwrap();
    for span in &spans {
        let of_job = began.as_nanos() as u64..=(began + now).as_nanos() as u64;
        assert!(of_job.contains(&span.start_time_unix_nano), "{span:?}");
        assert!(of_job.contains(&span.end_time_unix_nano), "{span:?}");
        let root = spans.iter().find(|root| root.span_id == span.parent_span_id);
        assert!(span.parent_span_id.is_empty() || root.is_some(), "{span:?}");
    }

    let changes = named(&spans, "membership change");
    assert_eq!(changes.len(), summary.memberships.len(), "{changes:?}");
    for (index, (change, span)) in summary.memberships.iter().zip(&changes).enumerate() {
        let known = attributes(&span.attributes);
        assert_eq!(known["elasticdl.cause"], text(change.cause.name()));
        assert_eq!(number(span, "elasticdl.generation"), change.generation.0);
        assert_eq!(number(span, "elasticdl.world_size"), u64::from(change.world_size));
        assert_eq!(number(span, "elasticdl.step"), change.at_step);
        let links: Vec<_> = span.links.iter().map(|link| &link.span_id).collect();
        assert_eq!(links, changes[..index].last().map_or(vec![], |before| vec![&before.span_id]));
        let Some(gap_ms) = change.gap_ms else { continue };
        assert!((took_ms(span) - gap_ms).abs() < 0.001, "{span:?}: {change:?}");
        let phases = change.phases().map(|(name, ms)| (name, ms.unwrap()));
        let parts = parts(&spans, span);
        assert_eq!(parts.len(), phases.len());
        for (part, (name, ms)) in parts.iter().zip(phases) {
            assert!((took_ms(part) - ms).abs() < 0.001, "{name}: {part:?}");
            // Phases that did not occur have the start of the next one.
            assert!(ms == 0.0 || part.name == name, "{name}: {part:?}");
        }
    }
    let lost = changes
        .iter()
        .find_map(|span| attributes(&span.attributes).remove("elasticdl.workers.lost"));
    let Some(Value::ArrayValue(lost)) = lost else { panic!("{changes:?}") };
    assert_eq!(lost.values[0].value, Some(Value::IntValue(killed.0 as i64)));

    let of_generation = |span: &Span| &changes[number(span, "elasticdl.generation") as usize - 1];
    let steps = named(&spans, "step");
    for step in &steps {
        let workers = parts(&spans, step);
        assert_eq!(workers.len() as u64, number(of_generation(step), "elasticdl.world_size"));
        let longest = workers.iter().map(|worker| took_ms(worker)).fold(0.0, f64::max);
        assert!(0.0 < longest && longest <= took_ms(step), "{step:?}: {workers:?}");
        let records = workers.iter().map(|worker| number(worker, "elasticdl.records"));
        assert_eq!(records.sum::<u64>(), 30, "{workers:?}");
    }
    let checkpoints = named(&spans, "checkpoint");
    for checkpoint in &checkpoints {
        let parts = parts(&spans, checkpoint);
        let names: Vec<_> = parts.iter().map(|part| &*part.name).collect();
        assert_eq!(names, ["copy", "write", "publish"]);
        let sum: f64 = parts.iter().map(|part| took_ms(part)).sum();
        assert!((sum - took_ms(checkpoint)).abs() < 0.001, "{checkpoint:?}: {parts:?}");
        assert!(parts.iter().all(|part| took_ms(part) > 0.0), "{parts:?}");
    }
    let evaluations = named(&spans, "evaluation");
    for evaluation in &evaluations {
        assert_eq!(number(evaluation, "elasticdl.records"), 6000);
        assert_eq!(
            attributes(&evaluation.attributes)["elasticdl.validation.loss"],
            Value::DoubleValue(1.0)
        );
        assert!(took_ms(evaluation) > 0.0, "{evaluation:?}");
    }
    let saved = summary.checkpoints.as_ref().unwrap().saved;
    let evaluated = summary.evaluations.as_ref().unwrap().all.len();
    assert_eq!((checkpoints.len() as u64, evaluations.len()), (saved, evaluated));
    assert!(!steps.is_empty());
    for root in [steps, checkpoints, evaluations].concat() {
        assert_eq!(root.links.len(), 1, "{root:?}");
        assert_eq!(root.links[0].trace_id, of_generation(root).trace_id, "{root:?}");
    }
}

/// A short job that exports to a collector with these variables. Returns its end, and how long the
/// command took longer than the job.
fn short_job(variables: Vec<(&'static str, std::ffi::OsString)>) -> (Ended, Duration) {
    let fixture = JobFixture { variables, ..JobFixture::new(PROGRAMS, 2) };
    let started = Instant::now();
    let ended = fixture.command(0).run();
    let took = started.elapsed();
    ended.assert_exact("a job without a collector");
    let job = Duration::from_secs_f64(ended.summary().wall_s);
    (ended, took.saturating_sub(job))
}

#[test]
fn a_collector_that_does_not_answer_delays_the_end_for_seconds() {
    let collector = Collector::start(Conduct::Hangs);
    let mut variables = collector.variables();
    variables.push(("OTEL_EXPORTER_OTLP_TIMEOUT", "600000".into()));
    let (ended, late) = short_job(variables);
    assert!(!collector.heard.lock().unwrap().is_empty());
    assert!(late < Duration::from_secs(20), "{late:?}");
    let error = ended.summary().tracking_error.clone().unwrap();
    assert_eq!(error, format!("traces: 127.0.0.1:{}: no answer in time", collector.port));
    assert!(ended.output.contains(&error), "{}", ended.output);
}

#[test]
fn a_collector_that_is_not_there_costs_a_line() {
    let (gone, off) = (Collector::at(1, Conduct::Takes), Collector::start(Conduct::Takes));
    let unknown = vec![("OTEL_EXPORTER_OTLP_ENDPOINT", "http://collector.invalid:4318".into())];
    let wrong = vec![("OTEL_EXPORTER_OTLP_ENDPOINT", "http://[collector".into())];
    for (variables, error) in [
        (gone.variables(), Some("127.0.0.1:1: ")),
        (unknown, Some("collector.invalid:4318: ")),
        (wrong, Some("invalid ")),
        ([off.variables(), vec![("OTEL_TRACES_EXPORTER", "none".into())]].concat(), None),
        ([off.variables(), vec![("OTEL_SDK_DISABLED", "true".into())]].concat(), None),
        ([off.variables(), vec![("OTEL_TRACES_SAMPLER", "always_off".into())]].concat(), None),
    ] {
        let context = format!("{variables:?}");
        let (ended, late) = short_job(variables);
        assert!(late < Duration::from_secs(20), "{context}: {late:?}");
        // A job that ends before it has sent anything tells it at the end alone.
        let lines = lines_about_traces(&ended);
        assert!(lines.len() <= usize::from(error.is_some()), "{context}: {lines:?}");
        let at_end = ended.summary().tracking_error.as_deref();
        let told: Vec<_> = lines.into_iter().chain(at_end).collect();
        assert_eq!(!told.is_empty(), error.is_some(), "{context}");
        assert!(told.iter().all(|told| told.contains(error.unwrap())), "{context}: {told:?}");
    }
    assert!(off.heard.lock().unwrap().is_empty());
}

#[test]
fn a_collector_that_was_away_gets_what_has_waited() {
    let collector = Collector::start(Conduct::Refuses);
    let variables = collector.variables();
    let fixture = JobFixture { epochs: 100_000, variables, ..JobFixture::new(PROGRAMS, 2) };
    let mut job = fixture.command(0).start();
    let tells = |text: &'static str| {
        move |status: &elasticdl_proto::Status| {
            status.events.iter().any(|event| event.contains(text))
        }
    };
    job.wait_for("the line about the error", tells("the job's traces are not exported: "));
    collector.behave(Conduct::Takes);
    job.wait_for("the line about the end of it", tells("the job's traces are exported again"));
    send(job.pid(), Signal::INT);
    let ended = job.wait();
    assert_eq!((lines_about_traces(&ended).len(), ended.code), (2, Some(130)), "{}", ended.output);
    assert_eq!(ended.summary().tracking_error, None);
    let spans = collector.spans();
    assert_eq!(named(&spans, "membership change").len(), 1, "{spans:?}");
    assert!(!named(&spans, "step").is_empty(), "{spans:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_collector_gets_traces_by_grpc() {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let collector = Collector::at(listener.local_addr().unwrap().port(), Conduct::Takes);
    let service = TraceServiceServer::new(collector.clone());
    let server = tonic::transport::Server::builder().add_service(service);
    tokio::spawn(server.serve_with_incoming(TcpListenerStream::new(listener)));
    let mut variables = collector.variables();
    variables.push(("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc".into()));
    let (ended, _) = tokio::task::spawn_blocking(|| short_job(variables)).await.unwrap();
    assert_eq!(ended.summary().tracking_error, None);
    assert!(!named(&collector.spans(), "step").is_empty());
}
