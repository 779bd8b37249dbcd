use std::sync::{Arc, Mutex};

use http::{Request, Response};
use kube::client::Body;

use super::super::client::Cluster;
use super::*;
use crate::job::testing::spec;
use crate::job::{Job, JobSpec};

/// What was written, and how many of the next writes fail.
#[derive(Default)]
struct Server {
    records: Mutex<Vec<(Instant, JobRecord)>>,
    failing: Mutex<u32>,
}

impl Server {
    fn start() -> (Arc<Self>, Keeper) {
        let server = Arc::new(Self::default());
        let own = Arc::clone(&server);
        let service = tower::service_fn(move |request: Request<Body>| {
            let server = Arc::clone(&own);
            async move { Ok::<_, std::convert::Infallible>(server.answer(request).await) }
        });
        let cluster = Cluster::with_client(kube::Client::new(service, "ns"), "ns");
        (server, Keeper::new(Anchor::new(&cluster, "job"), Warrant::unlimited()))
    }

    async fn answer(&self, request: Request<Body>) -> Response<Body> {
        assert_eq!(request.uri().path(), "/api/v1/namespaces/ns/configmaps/job");
        let body = request.into_body().collect_bytes().await.unwrap();
        let body: serde_json::Value = serde_json::from_slice(&body).unwrap();
        let failing = *self.failing.lock().unwrap();
        if failing > 0 {
            *self.failing.lock().unwrap() = failing - 1;
            return Response::builder().status(500).body(Body::empty()).unwrap();
        }
        let record = read(body["data"]["record"].as_str().unwrap()).unwrap();
        self.records.lock().unwrap().push((Instant::now(), record));
        Response::new(Body::from(b"{}".to_vec()))
    }

    fn seeds(&self) -> Vec<u64> {
        self.records.lock().unwrap().iter().map(|(_, record)| record.spec().seed).collect()
    }
}

/// A record that is told from others by its seed.
fn record(seed: u64) -> JobRecord {
    Job::new(JobSpec { seed, ..spec() }).record()
}

async fn kept(keeper: &mut Keeper, revision: u64) {
    while keeper.kept() < revision {
        keeper.changed().await;
    }
}

#[tokio::test(start_paused = true)]
async fn the_newest_is_written_once_a_second_and_what_somebody_waits_for_at_once() {
    let (server, mut keeper) = Server::start();
    let start = Instant::now();
    keeper.offer(1, 0, record(1));
    kept(&mut keeper, 1).await;
    assert!(start.elapsed() < Duration::from_millis(100));
    keeper.offer(2, 0, record(2));
    keeper.offer(3, 0, record(3));
    kept(&mut keeper, 3).await;
    assert!(start.elapsed() >= INTERVAL);
    keeper.offer(4, 4, record(4));
    let before = Instant::now();
    kept(&mut keeper, 4).await;
    assert!(before.elapsed() < Duration::from_millis(100));
    assert_eq!(server.seeds(), [1, 3, 4]);
}

#[tokio::test(start_paused = true)]
async fn a_server_that_is_away_gets_the_newest_when_it_is_back() {
    let (server, keeper) = Server::start();
    *server.failing.lock().unwrap() = 3;
    keeper.offer(1, 1, record(1));
    tokio::time::sleep(Duration::from_millis(10)).await;
    assert_eq!((keeper.kept(), server.seeds()), (0, vec![]));
    keeper.offer(2, 1, record(2));
    let mut all = keeper.watch();
    all.flush(Duration::from_secs(60)).await;
    assert_eq!((keeper.kept(), server.seeds()), (2, vec![2]));
    // There is an end to waiting, too.
    *server.failing.lock().unwrap() = u32::MAX;
    keeper.offer(3, 3, record(3));
    let before = Instant::now();
    all.flush(Duration::from_secs(3)).await;
    assert_eq!((before.elapsed(), keeper.kept()), (Duration::from_secs(3), 2));
}

#[test]
fn a_record_of_another_version_is_not_guessed_at() {
    let text = serde_json::to_string(&Versioned { version: VERSION, content: record(7) }).unwrap();
    assert_eq!(read(&text), Ok(record(7)));
    let other = text.replacen("\"version\":1", "\"version\":2", 1);
    assert!(read(&other).unwrap_err().contains("version 2"));
    assert!(read("{}").is_err() && read("").is_err());
}
