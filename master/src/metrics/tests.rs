use std::path::Path;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

use elasticdl_proto::TablesStatus;

use super::*;
use crate::job::testing::spec;
use crate::job::{Cause, Evaluated, Job, ShardCounts, StepTimes, Time};

fn snapshot() -> Snapshot {
    let mut snapshot = Job::new(spec()).snapshot(Time::default());
    snapshot.status.state = "running".into();
    snapshot.status.step = 7;
    snapshot.status.loss = Some(0.25);
    snapshot.status.learning_rate = Some(0.5);
    snapshot.status.tables = Some(TablesStatus { rows: 90, touches: 400, shards_at_risk: 3 });
    snapshot.status.shards = Some(ShardCounts { todo: 5, leased: 2, done: 1 });
    let metrics = [("a \"b\"".into(), Some(0.5)), ("none".into(), None)].into();
    snapshot.status.evaluated = Some(Evaluated { step: 4, records: 10, metrics });
    snapshot.counters.steps = 6;
    snapshot.counters.times = StepTimes { steps: 5, step_us: 2_500_000, reduce_us: 500_000 };
    snapshot.counters.ends.insert(End::Killed, 3);
    snapshot.counters.failures = 2;
    let gap =
        Histogram { buckets: [0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1], sum_ms: 90_004.0 };
    snapshot.counters.recoveries.insert(Cause::Lost, Recoveries { gap, ..Recoveries::default() });
    snapshot
}

#[test]
fn a_snapshot_has_the_openmetrics_format() {
    let name = spec().name;
    let page = to_text(&snapshot());
    let expected = [
        ("# TYPE elasticdl_step gauge", ""),
        ("elasticdl_state{training_job=\"NAME\",state=\"running\"}", " 1.0"),
        ("elasticdl_step{training_job=\"NAME\"}", " 7.0"),
        ("elasticdl_workers_disconnected{training_job=\"NAME\"}", " 0.0"),
        ("elasticdl_loss{training_job=\"NAME\"}", " 0.25"),
        ("elasticdl_learning_rate{training_job=\"NAME\"}", " 0.5"),
        ("elasticdl_table_rows{training_job=\"NAME\"}", " 90.0"),
        ("elasticdl_row_touches{training_job=\"NAME\"}", " 400.0"),
        ("elasticdl_table_shards_at_risk{training_job=\"NAME\"}", " 3.0"),
        ("elasticdl_shards{training_job=\"NAME\",state=\"leased\"}", " 2.0"),
        ("elasticdl_validation_step{training_job=\"NAME\"}", " 4.0"),
        ("elasticdl_validation{training_job=\"NAME\",metric=\"a \\\"b\\\"\"}", " 0.5"),
        ("# TYPE elasticdl_steps counter", ""),
        ("elasticdl_steps_total{training_job=\"NAME\"}", " 6.0"),
        ("elasticdl_step_seconds_total{training_job=\"NAME\"}", " 2.5"),
        ("elasticdl_all_reduce_seconds_total{training_job=\"NAME\"}", " 0.5"),
        ("elasticdl_worker_failures_total{training_job=\"NAME\"}", " 2.0"),
        ("elasticdl_worker_exits_total{training_job=\"NAME\",reason=\"killed\"}", " 3"),
        ("elasticdl_worker_exits_total{training_job=\"NAME\",reason=\"evicted\"}", " 0"),
        ("# TYPE elasticdl_recovery_seconds histogram", ""),
        ("elasticdl_recovery_seconds_sum{training_job=\"NAME\",cause=\"lost\"}", " 90.004"),
        ("elasticdl_recovery_seconds_count{training_job=\"NAME\",cause=\"lost\"}", " 3"),
        (
            "elasticdl_recovery_seconds_bucket{training_job=\"NAME\",le=\"0.002\",cause=\"lost\"}",
            " 0",
        ),
        (
            "elasticdl_recovery_seconds_bucket{training_job=\"NAME\",le=\"0.005\",cause=\"lost\"}",
            " 1",
        ),
        (
            "elasticdl_recovery_seconds_bucket{training_job=\"NAME\",le=\"60.0\",cause=\"lost\"}",
            " 2",
        ),
        (
            "elasticdl_recovery_seconds_bucket{training_job=\"NAME\",le=\"+Inf\",cause=\"lost\"}",
            " 3",
        ),
    ];
    for (start, end) in expected {
        let line = start.replace("NAME", &name) + end;
        assert!(page.lines().any(|l| l == line), "{line}\n{page}");
    }
    let phase = "elasticdl_recovery_phase_seconds_count";
    assert_eq!(page.lines().filter(|line| line.starts_with(phase)).count(), PHASES.len());
    assert!(page.ends_with("# EOF\n"));
}

/// The queries of the alerts and of the dashboard find what the exporter serves.
#[test]
fn alerts_and_dashboard_name_metrics_that_are_exported() {
    let mut snapshot = snapshot();
    snapshot.status.metrics = [("accuracy".into(), 0.5)].into();
    let page = to_text(&snapshot);
    let exported: BTreeSet<&str> = page
        .lines()
        .filter(|line| !line.starts_with('#'))
        .filter_map(|line| line.split(['{', ' ']).next())
        .collect();
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../manifests/monitoring");
    let mut named = 0;
    for file in ["rules.yaml", "dashboard.json"] {
        let text = std::fs::read_to_string(folder.join(file)).unwrap();
        for rest in text.split("elasticdl_").skip(1) {
            let end = rest.find(|c: char| c != '_' && !c.is_ascii_lowercase()).unwrap();
            let name = format!("elasticdl_{}", &rest[..end]);
            assert!(exported.contains(&*name), "{file}: {name} is not exported");
            named += 1;
        }
    }
    assert!(named > 20, "{named}");
}

#[test]
fn only_inference_has_metrics_of_leases() {
    let mut snapshot = snapshot();
    let has_leases = |snapshot: &Snapshot| to_text(snapshot).contains("elasticdl_leased_records");
    assert!(has_leases(&snapshot));
    snapshot.status.shards = None;
    assert!(!has_leases(&snapshot));
}

#[tokio::test]
async fn the_format_is_the_one_that_the_client_accepts() {
    let prometheus = "application/openmetrics-text;version=1.0.0;q=0.5,application/vnd.google\
                      .protobuf;q=0.4,text/plain;version=0.0.4;q=0.3,*/*;q=0.2";
    let table = [
        ("", false),
        ("Accept: */*\r\n", false),
        ("Accept: text/plain\r\n", false),
        ("Accept: application/openmetrics-text; q=0\r\n", false),
        ("Accept: application/openmetrics-text;q=0.1, text/plain;q=0.9\r\n", false),
        ("Accept: application/openmetrics-text\r\n", true),
        (&format!("Accept: {prometheus}\r\n"), true),
    ];
    for (accept, is_open) in table {
        let answer = ask(&format!("GET /metrics HTTP/1.1\r\nhost: x\r\n{accept}\r\n")).await;
        let format = if is_open { "application/openmetrics-text;" } else { "text/plain; version=" };
        assert!(answer.contains(&format!("content-type: {format}")), "{accept}: {answer:.300}");
        assert_eq!(answer.ends_with("# EOF\n"), is_open, "{accept}");
    }
}

#[test]
fn the_plain_format_declares_counters_with_their_suffix() {
    let (open, plain) = (to_text(&snapshot()), to_plain_text(&snapshot()));
    assert!(open.contains("# TYPE elasticdl_steps counter\n"), "{open}");
    assert!(plain.contains("\n# TYPE elasticdl_steps_total counter\n"), "{plain}");
    assert!(plain.contains("# HELP elasticdl_steps_total "), "{plain}");
    assert!(plain.contains("\n# TYPE elasticdl_recovery_seconds histogram\n"), "{plain}");
    let samples = |page: &str| -> Vec<String> {
        page.lines().filter(|line| !line.starts_with('#')).map(str::to_owned).collect()
    };
    assert_eq!(samples(&plain), samples(&open));
    assert!(!plain.contains("EOF"), "{plain}");
}

async fn ask(request: &str) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let (_publish, known) = watch::channel(Some(snapshot()));
    let serving = tokio::spawn(serve(listener, Some(known), std::sync::Arc::new(|| false)));
    let mut stream = TcpStream::connect(address).await.unwrap();
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut answer = Vec::new();
    // A request that is too long is not read to its end: the connection may be reset.
    let _ = stream.read_to_end(&mut answer).await;
    serving.abort();
    String::from_utf8(answer).unwrap()
}

#[tokio::test]
async fn the_server_answers_its_paths_and_rejects_other_requests() {
    let long = format!("GET /metrics HTTP/1.1\r\nhost: x\r\nlong: {}\r\n\r\n", "x".repeat(1 << 16));
    let table = [
        ("GET /metrics HTTP/1.1\r\nhost: x\r\n\r\n", "HTTP/1.1 200"),
        ("HEAD /metrics HTTP/1.0\r\n\r\n", "HTTP/1.0 200"),
        ("GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n", "HTTP/1.1 200"),
        ("GET /readyz HTTP/1.1\r\nhost: x\r\n\r\n", "HTTP/1.1 503"),
        ("GET / HTTP/1.1\r\nhost: x\r\n\r\n", "HTTP/1.1 404"),
        ("POST /metrics HTTP/1.1\r\nhost: x\r\ncontent-length: 3\r\n\r\nabc", "HTTP/1.1 405"),
        ("nonsense\r\n\r\n", "HTTP/1.1 400"),
        (&long, "HTTP/1.1 431"),
    ];
    for (request, expected) in table {
        let answer = ask(request).await;
        assert!(answer.starts_with(expected), "{:.40}: {answer:.200}", request);
        assert_eq!(
            answer.contains("elasticdl_step{"),
            request.starts_with("GET /metrics") && expected.ends_with("200")
        );
    }
}

#[tokio::test(start_paused = true)]
async fn silent_connections_time_out_and_the_next_one_is_served() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let (_publish, known) = watch::channel(None);
    tokio::spawn(serve(listener, Some(known), std::sync::Arc::new(|| false)));
    let mut silent = Vec::new();
    for _ in 0..20 {
        silent.push(TcpStream::connect(address).await.unwrap());
    }
    let mut stream = TcpStream::connect(address).await.unwrap();
    stream.write_all(b"GET /metrics HTTP/1.0\r\n\r\n").await.unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.unwrap();
    assert!(answer.starts_with("HTTP/1.0 503"), "{answer}");
}

#[tokio::test]
async fn without_metrics_only_the_probes_are_served() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let serving = tokio::spawn(serve(listener, None, std::sync::Arc::new(|| true)));
    for (path, code) in [("/metrics", 403), ("/healthz", 200), ("/readyz", 200)] {
        let mut stream = TcpStream::connect(address).await.unwrap();
        stream.write_all(format!("GET {path} HTTP/1.0\r\n\r\n").as_bytes()).await.unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.unwrap();
        assert!(answer.starts_with(&format!("HTTP/1.0 {code}")), "{path}: {answer}");
        assert!(!answer.contains("elasticdl_step"), "{answer}");
    }
    serving.abort();
}

#[tokio::test]
async fn clients_that_do_not_read_keep_no_other_waiting() {
    let listener = TcpListener::bind("0.0.0.0:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let serving = tokio::spawn(serve(listener, None, std::sync::Arc::new(|| true)));
    let mut silent = Vec::new();
    for host in 2..14 {
        for _ in 0..10 {
            let socket = tokio::net::TcpSocket::new_v4().unwrap();
            socket.bind(([127, 0, 0, host], 0).into()).unwrap();
            silent.push(socket.connect(([127, 0, 0, 1], port).into()).await.unwrap());
        }
    }
    let started = std::time::Instant::now();
    let mut stream = TcpStream::connect(("127.0.0.1", port)).await.unwrap();
    stream.write_all(b"GET /healthz HTTP/1.0\r\n\r\n").await.unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.unwrap();
    assert!(answer.starts_with("HTTP/1.0 200"), "{answer}");
    assert!(started.elapsed() < std::time::Duration::from_secs(5), "it waited for a timeout");
    drop(silent);
    serving.abort();
}
