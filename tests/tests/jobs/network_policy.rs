//! The network policies of a job allow the connections that it has, by the objects that a dry run
//! prints.

use std::net::IpAddr;
use std::process::Command;

use elasticdl_tests::cluster::{Peer, allows};
use serde_json::{Value, json};

const CONTROL: u16 = 7070;
const METRICS: u16 = 7071;
/// A port that the system chooses for links of the ring.
const RING: u16 = 40_123;

struct Objects {
    policies: Vec<Value>,
    master: Value,
    worker: Value,
}

impl Objects {
    /// The objects of the job `name`.
    fn new(name: &str, options: &[&str]) -> Self {
        let output = Command::new(env!("CARGO_BIN_EXE_elasticdl-under-test"))
            .args(["train", "--image", "i:1", "--job-name", name, "--namespace", "ml"])
            .args(["--training-data", "/data", "--dry-run"])
            .args(options)
            .args(["--", "program"])
            .output()
            .unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let text = String::from_utf8(output.stdout).unwrap();
        let objects: Vec<Value> = serde_saphyr::from_multiple(&text).unwrap();
        let of =
            |kind: &str| objects.iter().filter(|o| o["kind"] == kind).cloned().collect::<Vec<_>>();
        let anchor = of("ConfigMap").remove(0);
        let worker: Value =
            serde_json::from_str(anchor["data"]["worker-pod"].as_str().unwrap()).unwrap();
        let job = of("Job").remove(0);
        Self {
            policies: of("NetworkPolicy"),
            master: job["spec"]["template"]["metadata"]["labels"].clone(),
            worker: worker["metadata"]["labels"].clone(),
        }
    }

    fn allows(&self, from: Peer<'_>, to: Peer<'_>, port: u16) -> bool {
        allows(&self.policies, from, to, port)
    }
}

fn pod(labels: &Value) -> Peer<'_> {
    Peer { labels, namespace: &Value::Null, address: IpAddr::from([10, 1, 0, 1]) }
}

fn outside(address: [u8; 4]) -> Peer<'static> {
    Peer { labels: &Value::Null, namespace: &Value::Null, address: IpAddr::from(address) }
}

#[test]
fn only_the_workers_of_a_job_connect_to_its_pods() {
    let job = Objects::new("left", &[]);
    let other = Objects::new("right", &[]);
    let (master, worker) = (pod(&job.master), pod(&job.worker));
    assert!(job.allows(worker, worker, RING) && job.allows(worker, master, CONTROL));
    let service = json!({"app": "service"});
    let elsewhere = json!({"kubernetes.io/metadata.name": "elsewhere"});
    let peers = [
        pod(&other.worker),
        pod(&other.master),
        pod(&service),
        outside([10, 1, 0, 1]),
        // The same labels in another namespace.
        Peer { namespace: &elsewhere, ..worker },
    ];
    for peer in peers {
        for (to, port) in [(worker, RING), (master, CONTROL), (master, METRICS)] {
            assert!(!job.allows(peer, to, port), "{peer:?} to {port}");
        }
    }
    assert!(!job.allows(worker, master, METRICS) && !job.allows(master, worker, RING));
    // What the pods open is not limited.
    assert!(job.allows(worker, outside([192, 0, 2, 1]), 443));
}

#[test]
fn metrics_are_read_from_where_the_operator_says() {
    let monitoring = json!({"kubernetes.io/metadata.name": "monitoring"});
    let prometheus = json!({"app": "prometheus"});
    let scraper = Peer { namespace: &monitoring, ..pod(&prometheus) };
    // Namespace, address inside, address outside.
    for (from, allowed) in [
        ("monitoring", [true, false, false]),
        ("192.0.2.0/24", [false, true, false]),
        ("monitoring,192.0.2.0/24", [true, true, false]),
        ("any", [true, true, true]),
        ("192.0.2.0/24,any", [true, true, true]),
    ] {
        let job = Objects::new("left", &["--metrics-from", from]);
        let master = pod(&job.master);
        let peers = [scraper, outside([192, 0, 2, 9]), outside([198, 51, 100, 9])];
        assert_eq!(peers.map(|peer| job.allows(peer, master, METRICS)), allowed, "{from}");
        assert!(peers.iter().all(|&peer| !job.allows(peer, master, CONTROL)), "{from}");
        assert!(peers.iter().all(|&peer| !job.allows(peer, pod(&job.worker), RING)), "{from}");
    }
    let moved = Objects::new("left", &["--metrics-from", "any", "--metrics-port", "9100"]);
    let master = pod(&moved.master);
    assert!(moved.allows(scraper, master, 9100) && !moved.allows(scraper, master, METRICS));
}

#[test]
fn with_destinations_workers_reach_these_their_job_and_names_and_nothing_else() {
    let job = Objects::new("left", &["--egress-to", "192.0.2.0/24:443"]);
    let (master, worker) = (pod(&job.master), pod(&job.worker));
    assert!(job.allows(worker, worker, RING) && job.allows(worker, master, CONTROL));
    let [store, metadata_server] = [outside([192, 0, 2, 1]), outside([169, 254, 169, 254])];
    assert!(job.allows(worker, store, 443) && !job.allows(worker, store, 80));
    assert!(!job.allows(worker, metadata_server, 80) && !job.allows(worker, master, METRICS));
    assert!(job.allows(worker, metadata_server, 53), "names are resolved anywhere");
    let api_server = outside([198, 51, 100, 1]);
    assert!(job.allows(master, api_server, 6443) && job.allows(master, api_server, 443));
    assert!(!job.allows(master, api_server, 80) && !job.allows(worker, api_server, 6443));
    assert!(Objects::new("left", &["--no-network-policy"]).policies.is_empty());
}

#[test]
fn with_destinations_a_master_reaches_its_collector_of_traces_there() {
    let (collector, port) = (outside([192, 0, 2, 8]), 4318);
    let egress = ["--egress-to", "192.0.2.8/32:4318"];
    let plain = Objects::new("left", &egress);
    assert!(!plain.allows(pod(&plain.master), collector, port));
    let endpoint = "OTEL_EXPORTER_OTLP_ENDPOINT=http://192.0.2.8:4318";
    let traced = Objects::new("left", &[&egress[..], &["--env", endpoint]].concat());
    let master = pod(&traced.master);
    assert!(traced.allows(master, collector, port) && !traced.allows(master, collector, 4317));
    assert!(traced.allows(master, outside([198, 51, 100, 1]), 6443));
    assert!(!traced.allows(master, outside([198, 51, 100, 1]), port));
}
