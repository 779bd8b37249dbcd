use std::sync::Arc;

use serde_json::{Value, json};

use super::super::testing::FakeServer;
use super::*;

fn identity(pod: &str) -> Holder {
    Holder { pod: pod.into(), uid: format!("uid-of-{pod}") }
}

fn anchor() -> ObjectMeta {
    serde_json::from_value(json!({"name": "j", "namespace": "ns", "uid": "anchor"})).unwrap()
}

async fn acquire(cluster: &Cluster, pod: &str) -> LeaderLease {
    LeaderLease::acquire(cluster, &anchor(), &identity(pod)).await.unwrap()
}

/// A server at which the master `one` holds the Lease.
async fn held() -> (Arc<FakeServer>, Cluster, LeaderLease) {
    let (fake, cluster) = FakeServer::start();
    let lease = acquire(&cluster, "one").await;
    (fake, cluster, lease)
}

fn spec(fake: &FakeServer) -> Value {
    fake.state().object("leases", "j").unwrap()["spec"].clone()
}

/// Another master takes the Lease, unknown to this server's clients.
fn take(fake: &FakeServer, holder: &str) {
    let mut lease = fake.state().object("leases", "j").unwrap();
    lease["spec"]["holderIdentity"] = holder.into();
    lease["spec"]["leaseTransitions"] =
        (lease["spec"]["leaseTransitions"].as_i64().unwrap() + 1).into();
    fake.put("leases", "j", lease);
}

async fn is_pending(future: impl Future) -> bool {
    timeout(Duration::from_millis(1), future).await.is_err()
}

#[tokio::test(start_paused = true)]
async fn the_first_master_creates_the_lease_and_renews_it_four_times_a_minute() {
    let (fake, _, mut lease) = held().await;
    let object = fake.state().object("leases", "j").unwrap();
    let owner = &object["metadata"]["ownerReferences"][0];
    assert_eq!((&owner["kind"], &owner["uid"]), (&json!("ConfigMap"), &json!("anchor")));
    assert_eq!(object["spec"]["holderIdentity"], "one/uid-of-one");
    assert_eq!(object["spec"]["leaseDurationSeconds"], 45);
    tokio::time::sleep(Duration::from_secs(601)).await;
    let counts = ["PUT leases", "GET leases"].map(|kind| fake.state().count(kind));
    assert_eq!(counts, [40, 1]);
    assert!(is_pending(lease.lost()).await);
    assert_eq!(lease.guard().during(async { 7 }).await, Some(7));
}

#[tokio::test(start_paused = true)]
async fn a_released_lease_is_taken_by_the_waiting_master() {
    let (fake, cluster, lease) = held().await;
    let next = tokio::spawn(async move { acquire(&cluster, "two").await });
    tokio::time::sleep(Duration::from_secs(600)).await;
    assert!(!next.is_finished());
    let released = Instant::now();
    lease.release().await;
    let _next = next.await.unwrap();
    assert!(released.elapsed() <= Duration::from_secs(5));
    assert_eq!(
        (&spec(&fake)["holderIdentity"], &spec(&fake)["leaseTransitions"]),
        (&json!("two/uid-of-two"), &json!(1))
    );
}

#[tokio::test(start_paused = true)]
async fn a_master_that_has_released_the_lease_may_not_act() {
    let (fake, _, lease) = held().await;
    let mut guard = lease.guard();
    lease.release().await;
    assert_eq!(spec(&fake)["holderIdentity"], "");
    assert!(is_pending(guard.during(async {})).await);
}

#[tokio::test(start_paused = true)]
async fn the_lease_of_a_master_that_has_ended_is_taken_at_once() {
    let pod = |uid: &str, state: Value| {
        let container = json!({
            "name": "master", "image": "i", "imageID": "",
            "ready": false, "restartCount": 0, "state": state
        });
        let status = json!({"phase": "Failed", "containerStatuses": [container]});
        json!({"metadata": {"name": "one", "uid": uid}, "status": status})
    };
    let ended = || json!({"terminated": {"exitCode": 137}});
    // Each row: the holder's pod, and the time until its Lease is taken.
    let table = [
        (Some(pod("uid-of-one", ended())), 0),
        (Some(pod("uid-of-another", ended())), 45),
        // The status that the garbage collector sets for a node that does not answer.
        (Some(pod("uid-of-one", json!({"running": {}}))), 45),
        (None, 45),
    ];
    for (there, seconds) in table {
        let (fake, cluster, lease) = held().await;
        // The master dies without releasing the Lease.
        drop(lease);
        if let Some(pod) = &there {
            fake.put("pods", "one", pod.clone());
        }
        let before = Instant::now();
        let _lease = acquire(&cluster, "two").await;
        assert_eq!(before.elapsed().as_secs(), seconds, "{there:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_master_that_has_lost_its_lease_is_fenced_and_writes_nothing() {
    let (fake, _, mut lease) = held().await;
    take(&fake, "two/x");
    assert_eq!(lease.lost().await, LeaseLoss::Fenced("two/x".into()));
    let puts = fake.state().count("PUT leases");
    let mut guard = lease.guard();
    assert!(is_pending(guard.during(async {})).await);
    lease.release().await;
    tokio::time::sleep(Duration::from_secs(600)).await;
    assert_eq!(fake.state().count("PUT leases"), puts);
    assert_eq!(spec(&fake)["holderIdentity"], "two/x");
}

#[tokio::test(start_paused = true)]
async fn a_master_that_slept_while_another_held_and_released_the_lease_is_fenced() {
    let (fake, _, mut lease) = held().await;
    take(&fake, "");
    assert_eq!(lease.lost().await, LeaseLoss::Fenced("another, which has ended".into()));
}

#[tokio::test(start_paused = true)]
async fn a_lost_answer_to_an_accepted_write_does_not_fence_the_master() {
    let (fake, _, mut lease) = held().await;
    fake.state().lost = 1;
    tokio::time::sleep(Duration::from_secs(60)).await;
    assert_eq!(fake.state().lost, 0);
    assert!(is_pending(lease.lost()).await);
    assert_eq!(spec(&fake)["leaseTransitions"], 0);
}

#[tokio::test(start_paused = true)]
async fn the_guard_expires_while_the_server_is_unreachable_and_becomes_valid_again() {
    let (fake, _, mut lease) = held().await;
    let start = Instant::now();
    // The renewal at 15 s is the last one that is answered.
    tokio::time::sleep(Duration::from_secs(16)).await;
    fake.state().unreachable = true;
    let mut guard = lease.guard();
    let unanswered = guard.during(std::future::pending::<()>()).await;
    assert_eq!((unanswered, start.elapsed().as_secs()), (None, 55));
    assert!(is_pending(guard.during(async {})).await);
    tokio::time::sleep(Duration::from_secs(3600)).await;
    fake.state().unreachable = false;
    let back = Instant::now();
    assert_eq!(guard.during(async { 7 }).await, Some(7));
    assert!(back.elapsed() <= Duration::from_secs(15), "{:?}", back.elapsed());
    assert!(is_pending(lease.lost()).await);
    // A master that has stopped acting waits for a later renewal.
    let start = Instant::now();
    guard.renewed().await;
    assert!(
        (Duration::from_secs(1)..Duration::from_secs(16)).contains(&start.elapsed()),
        "{:?}",
        start.elapsed()
    );
}

#[tokio::test(start_paused = true)]
async fn a_refusal_names_the_missing_permission() {
    let (fake, cluster) = FakeServer::start();
    fake.state().throttles.push_back(("GET leases", 403, 0));
    let error = LeaderLease::acquire(&cluster, &anchor(), &identity("one")).await.unwrap_err();
    assert!(matches!(error, ClusterError::Forbidden { .. }), "{error}");
}

#[test]
fn an_identity_is_parsed_as_it_is_formatted() {
    let one = identity("one");
    assert_eq!(one.to_string().parse(), Ok(one));
    for bad in ["", "one", "/x", "one/", "a/b/c"] {
        assert!(bad.parse::<Holder>().is_err(), "{bad}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_master_whose_token_is_refused_for_a_minute_ends_and_not_before() {
    let (fake, _, mut lease) = held().await;
    fake.state().throttles.extend([("PUT leases", 401, 0); 5]);
    tokio::time::sleep(Duration::from_secs(600)).await;
    assert!(is_pending(lease.lost()).await);
    assert!(fake.state().throttles.is_empty());
    fake.state().throttles.extend([("PUT leases", 401, 0); 1000]);
    let since = Instant::now();
    assert!(matches!(lease.lost().await, LeaseLoss::Unauthorized(_)));
    assert!((60..90).contains(&since.elapsed().as_secs()), "{:?}", since.elapsed());
    assert!(!lease.guard().is_valid());
}
