//! Prometheus and TensorBoard show a job, and the cost of a kill.

use std::collections::BTreeMap;
use std::io::{Read as _, Write as _};
use std::net::TcpStream;

use elasticdl_tests::{JobFixture, send};
use rustix::process::Signal;

use crate::PROGRAMS;

/// A request for the format that Prometheus prefers.
const REQUEST: &[u8] =
    b"GET /metrics HTTP/1.1\r\nhost: master\r\naccept: application/openmetrics-text\r\n\r\n";

/// The samples of the endpoint at `address`, by name and labels.
fn scrape(address: &str) -> BTreeMap<String, f64> {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.write_all(REQUEST).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    assert!(answer.starts_with("HTTP/1.1 200") && answer.ends_with("# EOF\n"), "{answer}");
    let numbers = answer.lines().filter(|line| line.starts_with("elasticdl_"));
    let number = |line: &str| {
        let (name, value) = line.rsplit_once(' ').unwrap();
        (name.replace("training_job=\"counted\"", ""), value.parse().unwrap())
    };
    numbers.map(number).collect()
}

#[test]
fn a_job_exports_metrics_to_prometheus_and_tensorboard() {
    let fixture = JobFixture {
        epochs: 100_000,
        micros_per_record: 100,
        global_batch_size: 30,
        ..JobFixture::new(PROGRAMS, 3)
    };
    let runs = fixture.path("runs");
    let mut job = fixture
        .command(0)
        .option("job-name", "counted")
        .option("metrics-port", "0")
        .option("tensorboard-dir", &runs)
        .start();
    job.wait_for_work_of(3);
    let log = std::fs::read_to_string(fixture.path("job/logs/master.log")).unwrap();
    let address = log.split("metrics at http://").nth(1).unwrap().split("/metrics").next().unwrap();
    send(*job.workers().values().next_back().unwrap(), Signal::KILL);
    job.wait_for("what the loss cost is known", |_| {
        scrape(address).get("elasticdl_recovery_seconds_count{,cause=\"lost\"}") == Some(&1.0)
    });
    let page = scrape(address);
    assert_eq!(page["elasticdl_worker_exits_total{,reason=\"killed\"}"], 1.0);
    assert!(
        page["elasticdl_steps_total{}"] > 3.0 && page["elasticdl_records_total{}"] > 90.0,
        "{page:?}"
    );
    assert_eq!(page["elasticdl_training{,metric=\"seen\"}"], 1.0);
    let times = ["elasticdl_step_seconds_total{}", "elasticdl_all_reduce_seconds_total{}"]
        .map(|name| page[name]);
    assert!(times[0] > times[1] && times[1] > 0.0, "{times:?}");
    send(job.pid(), Signal::INT);
    assert_eq!(job.wait().code, Some(130));
    let files: Vec<_> = std::fs::read_dir(runs.join("counted"))
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .collect();
    let [file] = &files[..] else { panic!("one file: {files:?}") };
    let bytes = std::fs::read(file).unwrap();
    let words = ["brain.Event:2", "loss", "training/seen", "records_per_s", "workers", "step_ms"];
    for word in words.into_iter().chain(["all_reduce_ms"]) {
        assert!(bytes.windows(word.len()).any(|part| part == word.as_bytes()), "{word}");
    }
}
