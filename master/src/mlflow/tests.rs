use std::sync::{Arc, Mutex};

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};

use super::*;
use crate::job::testing::spec;
use crate::job::{Evaluated, Job, Time};

/// A tracking server that remembers what it was sent: method, path, authorization and body.
struct Server {
    uri: String,
    seen: Arc<Mutex<Vec<(String, String, Value)>>>,
}

impl Server {
    /// `knows`: whether the experiment and the run exist.
    async fn start(knows: bool) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let uri = format!("http://{}/", listener.local_addr().unwrap());
        let seen: Arc<Mutex<Vec<_>>> = Arc::default();
        let log = Arc::clone(&seen);
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let (request, authorization, body) = read(stream, knows).await;
                log.lock().unwrap().push((request, authorization, body));
            }
        });
        Self { uri, seen }
    }

    fn tracking(&self, more: &[(&str, &str)]) -> Tracking {
        let mut set = vec![("MLFLOW_TRACKING_URI", self.uri.as_str())];
        set.extend(more);
        read_variables(&set).unwrap().unwrap()
    }

    /// The requests, in order.
    fn requests(&self) -> Vec<String> {
        self.seen.lock().unwrap().iter().map(|(request, ..)| request.clone()).collect()
    }

    /// Bodies of the requests to this path.
    fn bodies(&self, path: &str) -> Vec<Value> {
        let seen = self.seen.lock().unwrap();
        seen.iter().filter(|(to, ..)| to.contains(path)).map(|(.., body)| body.clone()).collect()
    }
}

/// Reads one request, and answers it as MLflow does.
async fn read(mut stream: TcpStream, knows: bool) -> (String, String, Value) {
    let mut bytes = Vec::new();
    let (head, length) = loop {
        let mut part = [0; 4096];
        let len = stream.read(&mut part).await.unwrap();
        bytes.extend_from_slice(&part[..len]);
        let text = String::from_utf8_lossy(&bytes).into_owned();
        let Some(end) = text.find("\r\n\r\n") else { continue };
        let header = |name: &str| {
            let mut lines = text[..end].lines();
            lines.find_map(|line| {
                let (key, value) = line.split_once(": ")?;
                key.eq_ignore_ascii_case(name).then(|| value.to_owned())
            })
        };
        let length: usize = header("content-length").map_or(0, |len| len.parse().unwrap());
        let request = text.lines().next().unwrap().trim_end_matches(" HTTP/1.1").to_owned();
        let head = (request, header("authorization").unwrap_or_default());
        if bytes.len() >= end + 4 + length {
            break (head, end + 4);
        }
    };
    let body = serde_json::from_slice(&bytes[length..]).unwrap_or_default();
    let (status, answer) = match head.0.split("mlflow/").nth(1).unwrap() {
        path if path.starts_with("experiments/get-by-name") && !knows => {
            (404, json!({"error_code": "RESOURCE_DOES_NOT_EXIST", "message": "no"}))
        }
        path if path.starts_with("experiments/get-by-name") => {
            (200, json!({"experiment": {"experiment_id": "4"}}))
        }
        "experiments/create" => (200, json!({"experiment_id": "5"})),
        "runs/search" if knows => (200, json!({"runs": [{"info": {"run_id": "old"}}]})),
        "runs/create" => (200, json!({"run": {"info": {"run_id": "new"}}})),
        _ => (200, json!({})),
    };
    let answer = answer.to_string();
    let response = format!(
        "HTTP/1.1 {status} X\r\ncontent-length: {}\r\nconnection: close\r\n\r\n{answer}",
        answer.len()
    );
    stream.write_all(response.as_bytes()).await.unwrap();
    (head.0, head.1, body)
}

fn read_variables(set: &[(&str, &str)]) -> Result<Option<Tracking>, TrackingError> {
    Tracking::read(|name| {
        set.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).into())
    })
}

/// A snapshot at `step`, of a job in `state`.
fn snapshot(step: u64, state: &'static str) -> Snapshot {
    let mut snapshot = Job::new(spec()).snapshot(Time::default());
    let status = &mut snapshot.status;
    (status.step, status.state, status.run_id) = (step, state.into(), "id-1".into());
    (status.loss, status.learning_rate) = (Some(0.5), Some(0.125));
    status.records_per_s = f64::NAN;
    snapshot
}

/// Follows a job of these snapshots to its end.
async fn follow_all(tracking: Tracking, snapshots: Vec<Snapshot>) {
    let (publish, known) = watch::channel(None);
    for snapshot in snapshots {
        publish.send_replace(Some(snapshot));
    }
    drop(publish);
    let _ = follow(tracking, known, mpsc::channel(1).0).await;
}

#[tokio::test]
async fn a_job_is_a_run_with_parameters_metrics_and_its_end() {
    let server = Server::start(false).await;
    let tracking = server.tracking(&[
        ("MLFLOW_EXPERIMENT_NAME", "digits & more"),
        ("MLFLOW_TRACKING_TOKEN", "secret"),
    ]);
    let tracking = tracking.with_parameters(vec![("seed".into(), "7".into())]);
    let mut last = snapshot(9, "completed");
    let metrics = [("accuracy".into(), Some(0.75)), ("loss".into(), None)].into();
    last.evaluations = Arc::new(vec![(1, Evaluated { step: 8, records: 10, metrics })]);
    follow_all(tracking, vec![last]).await;
    let api = |path: &str| format!("POST /api/2.0/mlflow/{path}");
    let expected = [
        "GET /api/2.0/mlflow/experiments/get-by-name?experiment_name=digits+%26+more".into(),
        api("experiments/create"),
        api("runs/search"),
        api("runs/create"),
        api("runs/log-batch"),
        api("runs/log-batch"),
        api("runs/update"),
    ];
    assert_eq!(server.requests(), expected);
    assert_eq!(server.bodies("experiments/create"), [json!({"name": "digits & more"})]);
    let created = server.bodies("runs/create").remove(0);
    assert_eq!((&created["experiment_id"], &created["run_name"]), (&json!("5"), &json!("job")));
    assert_eq!(created["tags"][1], json!({"key": "elasticdl.run_id", "value": "id-1"}));
    let [parameters, batch] = server.bodies("runs/log-batch").try_into().unwrap();
    let expected = json!({"run_id": "new", "params": [{"key": "seed", "value": "7"}]});
    assert_eq!(parameters, expected);
    let metric =
        |metric: &Value| (metric["key"].clone(), metric["value"].clone(), metric["step"].clone());
    let metrics: Vec<_> = batch["metrics"].as_array().unwrap().iter().map(metric).collect();
    let expected = [
        (json!("validation/accuracy"), json!(0.75), json!(8)),
        (json!("loss"), json!(0.5), json!(9)),
        (json!("learning_rate"), json!(0.125), json!(9)),
    ];
    assert_eq!(metrics, expected, "values that are not finite are skipped");
    let update = server.bodies("runs/update").remove(0);
    assert_eq!((&update["run_id"], &update["status"]), (&json!("new"), &json!("FINISHED")));
    let seen = server.seen.lock().unwrap();
    assert!(seen.iter().all(|(_, authorization, _)| authorization == "Bearer secret"));
}

#[tokio::test]
async fn the_next_master_of_a_job_continues_its_run() {
    let server = Server::start(true).await;
    let login = [("MLFLOW_TRACKING_USERNAME", "me"), ("MLFLOW_TRACKING_PASSWORD", "pw")];
    follow_all(server.tracking(&login), vec![snapshot(3, "stopped")]).await;
    let search = server.bodies("runs/search").remove(0);
    assert_eq!(search["filter"], "tags.`elasticdl.run_id` = 'id-1'");
    assert_eq!(server.bodies("runs/create"), [json!(null); 0]);
    assert_eq!(server.bodies("runs/log-batch")[0]["run_id"], "old");
    assert_eq!(server.bodies("runs/update")[0]["status"], "KILLED");
    assert_eq!(server.seen.lock().unwrap()[0].1, "Basic bWU6cHc=");
}

#[tokio::test]
async fn a_master_that_hands_its_job_over_does_not_end_the_run() {
    let server = Server::start(true).await;
    follow_all(server.tracking(&[]), vec![snapshot(3, "running")]).await;
    assert_eq!(server.bodies("runs/log-batch").len(), 1);
    assert_eq!(server.bodies("runs/update"), [json!(null); 0]);
}

#[tokio::test]
async fn a_server_that_is_away_delays_the_end_of_a_job_by_nothing() {
    let closed = TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap();
    let uri = format!("http://{closed}");
    let tracking = read_variables(&[("MLFLOW_TRACKING_URI", &uri)]).unwrap().unwrap();
    let error = tracking.run(&snapshot(1, "running").status).await.unwrap_err().to_string();
    assert!(error.starts_with("experiments/get-by-name: ") && error.contains("refused"), "{error}");
    follow_all(tracking, vec![snapshot(3, "failed")]).await;
}

#[tokio::test]
async fn each_evaluation_is_sent_once_and_in_requests_of_less_than_a_thousand_values() {
    let server = Server::start(true).await;
    let (publish, known) = watch::channel(None);
    let following = tokio::spawn(follow(server.tracking(&[]), known, mpsc::channel(1).0));
    let evaluated = |number: u64| {
        let metrics = (0..11).map(|i| (format!("m{i}"), Some(number as f64))).collect();
        (number, Evaluated { step: number * 10, records: 5, metrics })
    };
    // Some of them between two samples.
    for evaluations in [1, 2, 40, 85, 200] {
        let mut snapshot = snapshot(10 * evaluations, "running");
        snapshot.evaluations = Arc::new((1..=evaluations).map(evaluated).collect());
        publish.send_replace(Some(snapshot));
        tokio::task::yield_now().await;
    }
    drop(publish);
    assert_eq!(following.await.unwrap(), None);
    let batches = server.bodies("runs/log-batch");
    let sizes: Vec<usize> =
        batches.iter().map(|batch| batch["metrics"].as_array().unwrap().len()).collect();
    assert!(sizes.iter().all(|size| *size < 1000) && sizes.len() > 2, "{sizes:?}");
    let metrics = batches.iter().flat_map(|batch| batch["metrics"].as_array().unwrap());
    let of_first = metrics.filter(|metric| metric["key"] == "validation/m0");
    let steps: Vec<u64> = of_first.map(|metric| metric["step"].as_u64().unwrap()).collect();
    assert_eq!(steps, (1..=200).map(|number| number * 10).collect::<Vec<u64>>());
}

#[tokio::test]
async fn a_wrong_address_is_reported_once_at_the_beginning_and_at_the_end() {
    let closed = TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap();
    let uri = format!("http://{closed}");
    let tracking = read_variables(&[("MLFLOW_TRACKING_URI", &uri)]).unwrap().unwrap();
    let (publish, known) = watch::channel(None);
    let (news, mut received) = mpsc::channel(4);
    let following = tokio::spawn(follow(tracking, known, news));
    publish.send_replace(Some(snapshot(1, "running")));
    let Some(Event::Tracked { error: Some(error) }) = received.recv().await else { panic!() };
    assert!(error.starts_with(&uri) && error.contains("refused"), "{error}");
    drop(publish);
    assert_eq!(following.await.unwrap(), Some(error));
    assert_eq!(received.recv().await, None, "it was said");
}

#[tokio::test]
async fn a_job_that_its_deadline_stopped_is_finished() {
    let server = Server::start(true).await;
    let mut last = snapshot(3, "stopped");
    last.status.stop_reason = Some("the deadline of 4 s has passed".into());
    follow_all(server.tracking(&[]), vec![last]).await;
    assert_eq!(server.bodies("runs/update")[0]["status"], "FINISHED");
}

#[test]
fn arguments_of_the_program_are_parameters() {
    let args = ["data.bin", "--width", "32", "--rate=0.5", "--verbose", "--seed", "9", "--", "x"];
    let all = parameters(&spec(), args);
    let of_program: Vec<(&str, &str)> =
        all[5..].iter().map(|(key, value)| (key.as_str(), value.as_str())).collect();
    let expected = [("width", "32"), ("rate", "0.5"), ("verbose", "true"), ("program/seed", "9")];
    assert_eq!(of_program, expected);
}

#[test]
fn only_the_address_of_a_server_is_accepted() {
    assert!(read_variables(&[]).unwrap().is_none());
    assert!(read_variables(&[("MLFLOW_TRACKING_URI", "")]).unwrap().is_none());
    for wrong in ["mlruns", "file:///mlruns", "sqlite:///a.db", "databricks", "http://"] {
        let error = read_variables(&[("MLFLOW_TRACKING_URI", wrong)]).unwrap_err().to_string();
        assert!(error.contains(wrong) && error.contains("http://127.0.0.1:5000"), "{error}");
    }
}
