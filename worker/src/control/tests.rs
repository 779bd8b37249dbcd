//! The control stream against a minimal master.

use std::collections::BTreeMap;
use std::net::Ipv4Addr;
use std::sync::Mutex;

use elasticdl_proto::v1::master_server::{Master, MasterServer};
use tokio_stream::wrappers::TcpListenerStream;
use tonic::{Response, Status};
use v1::master_message::Kind as FromMasterKind;
use v1::worker_message::Kind as FromWorkerKind;

use super::*;
use crate::environment::Tls;

type Outgoing = mpsc::UnboundedSender<Result<v1::MasterMessage, Status>>;

/// Streams of workers, by number. Their messages are passed to the test, which sends the answers.
struct TestMaster {
    received: Sender<(usize, FromWorkerKind)>,
    streams: Arc<Mutex<BTreeMap<usize, Outgoing>>>,
    /// Number of the first stream that is refused.
    refuse_from: usize,
    count: std::sync::atomic::AtomicUsize,
    /// Incarnation of this master.
    incarnation: Arc<std::sync::atomic::AtomicU64>,
}

#[tonic::async_trait]
impl Master for TestMaster {
    type JoinStream = UnboundedReceiverStream<Result<v1::MasterMessage, Status>>;

    async fn join(
        &self,
        request: Request<Streaming<v1::WorkerMessage>>,
    ) -> Result<Response<Self::JoinStream>, Status> {
        let number = self.count.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        if number >= self.refuse_from {
            return Err(Status::failed_precondition("no longer wanted"));
        }
        let (outgoing, incoming) = mpsc::unbounded_channel();
        let options = v1::Options {
            batch: Some(v1::options::Batch::GlobalBatchSize(4)),
            epochs: 1,
            work: Some(v1::options::Work::Train(v1::Train::default())),
            ..v1::Options::default()
        };
        let welcome = v1::Welcome {
            worker: 7,
            options: Some(options),
            incarnation: self.incarnation.load(std::sync::atomic::Ordering::Relaxed),
        };
        outgoing
            .send(Ok(v1::MasterMessage { kind: Some(FromMasterKind::Welcome(welcome)) }))
            .unwrap();
        self.streams.lock().unwrap().insert(number, outgoing);
        let (received, mut stream) = (self.received.clone(), request.into_inner());
        tokio::spawn(async move {
            while let Ok(Some(v1::WorkerMessage { kind: Some(kind) })) = stream.message().await {
                if !matches!(kind, FromWorkerKind::Heartbeat(_))
                    && received.send((number, kind)).is_err()
                {
                    return;
                }
            }
        });
        Ok(Response::new(UnboundedReceiverStream::new(incoming)))
    }

    async fn status(
        &self,
        _: Request<v1::StatusRequest>,
    ) -> Result<Response<v1::StatusReply>, Status> {
        Err(Status::unimplemented("not called by this test"))
    }

    async fn checkpoint(
        &self,
        _: Request<v1::CheckpointRequest>,
    ) -> Result<Response<v1::CheckpointReply>, Status> {
        Err(Status::unimplemented("not called by this test"))
    }

    async fn scale(
        &self,
        _: Request<v1::ScaleRequest>,
    ) -> Result<Response<v1::ScaleReply>, Status> {
        Err(Status::unimplemented("not called by this test"))
    }
}

struct Fixture {
    environment: Environment,
    received: std::sync::mpsc::Receiver<(usize, FromWorkerKind)>,
    streams: Arc<Mutex<BTreeMap<usize, Outgoing>>>,
    incarnation: Arc<std::sync::atomic::AtomicU64>,
}

impl Fixture {
    fn new(refuse_from: usize) -> Self {
        Self::with(refuse_from, tonic::transport::Server::builder())
    }

    /// A master with the returned certificate, under the name `master`.
    fn over_tls() -> (Self, String) {
        let key = rcgen::KeyPair::generate().unwrap();
        let certificate = rcgen::CertificateParams::new(["master".into()])
            .unwrap()
            .self_signed(&key)
            .unwrap()
            .pem();
        let identity = tonic::transport::Identity::from_pem(&certificate, key.serialize_pem());
        let config = tonic::transport::ServerTlsConfig::new().identity(identity);
        (
            Self::with(usize::MAX, tonic::transport::Server::builder().tls_config(config).unwrap()),
            certificate,
        )
    }

    fn with(refuse_from: usize, mut server: tonic::transport::Server) -> Self {
        let (sender, received) = channel();
        let streams = Arc::default();
        let count = std::sync::atomic::AtomicUsize::default();
        let incarnation = Arc::new(2.into());
        let master = TestMaster {
            received: sender,
            streams: Arc::clone(&streams),
            refuse_from,
            count,
            incarnation: Arc::clone(&incarnation),
        };
        let listener = std::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        listener.set_nonblocking(true).unwrap();
        let environment = Environment {
            master: listener.local_addr().unwrap().to_string(),
            job: "job".into(),
            launch: 3,
            token: "token".into(),
            tls: None,
            master_timeout: Duration::from_secs(60),
        };
        std::thread::spawn(move || {
            let runtime =
                tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async {
                let incoming =
                    TcpListenerStream::new(tokio::net::TcpListener::from_std(listener).unwrap());
                server
                    .add_service(MasterServer::new(master))
                    .serve_with_incoming(incoming)
                    .await
                    .unwrap();
            });
        });
        Self { environment, received, streams, incarnation }
    }

    fn address() -> SocketAddr {
        (Ipv4Addr::LOCALHOST, 9).into()
    }

    fn hello(&self, resume: Option<v1::Resume>) -> FromWorkerKind {
        let (job, address) = ("job".into(), Self::address().to_string());
        FromWorkerKind::Hello(v1::Hello {
            job,
            launch: 3,
            address,
            pid: std::process::id(),
            resume,
        })
    }

    fn next(&self) -> (usize, FromWorkerKind) {
        self.received.recv_timeout(Duration::from_secs(60)).unwrap()
    }

    fn send(&self, number: usize, kind: FromMasterKind) {
        self.streams.lock().unwrap()[&number]
            .send(Ok(v1::MasterMessage { kind: Some(kind) }))
            .unwrap();
    }

    fn end(&self, number: usize) {
        self.streams.lock().unwrap().remove(&number).unwrap();
    }
}

fn membership(generation: u64) -> v1::Membership {
    let member = v1::Member { worker: 7, address: "127.0.0.1:9".into() };
    v1::Membership { generation, members: vec![member], abort: false }
}

fn lease_request(epoch: u32) -> ToMaster {
    ToMaster::Report(Report::LeaseRequest { epoch, records: 2 })
}

#[test]
fn a_new_master_learns_the_workers_identity_and_gets_no_message_for_the_previous_one() {
    let fixture = Fixture::new(usize::MAX);
    let control = Control::open(&fixture.environment, Fixture::address()).unwrap();
    assert_eq!(fixture.next(), (0, fixture.hello(None)));
    control.outbox.send(ToMaster::Ready { parameters: 5 });
    assert_eq!(fixture.next(), (0, FromWorkerKind::Ready(v1::Ready { parameters: 5 })));
    fixture.send(0, FromMasterKind::Membership(membership(3)));
    fixture.send(0, FromMasterKind::Membership(membership(4)));
    // A late membership of an older generation is ignored.
    fixture.send(0, FromMasterKind::Membership(membership(2)));
    assert!(matches!(control.inbox.recv().unwrap(), FromMaster::Membership(..)));
    assert!(matches!(control.inbox.recv().unwrap(), FromMaster::Membership(..)));
    assert!(matches!(control.inbox.recv().unwrap(), FromMaster::Membership(..)));
    fixture.end(0);
    assert_eq!(control.inbox.recv().unwrap(), FromMaster::Reconnected);
    let resume = v1::Resume {
        worker: 7,
        membership: Some(membership(4)),
        parameters: Some(5),
        incarnation: 2,
    };
    assert_eq!(fixture.next(), (1, fixture.hello(Some(resume))));
    // The trainer has not read its inbox yet.
    control.outbox.send(lease_request(0));
    control.outbox.send(ToMaster::Report(Report::HeldLeases { step: 6, ranges: Vec::new() }));
    control.outbox.send(lease_request(1));
    assert_eq!(
        fixture.next(),
        (1, FromWorkerKind::HeldLeases(v1::HeldLeases { step: 6, ranges: Vec::new() }))
    );
    assert_eq!(
        fixture.next(),
        (1, FromWorkerKind::LeaseRequest(v1::LeaseRequest { epoch: 1, records: 2 }))
    );
    fixture.streams.lock().unwrap().clear();
    control.close();
}

#[test]
fn a_refusal_ends_the_search_for_a_master_and_silence_does_not() {
    let fixture = Fixture::new(0);
    let me = Some(v1::Resume {
        worker: 7,
        membership: Some(membership(4)),
        parameters: Some(5),
        incarnation: 2,
    });
    let connector =
        MasterConnector { environment: fixture.environment, address: Fixture::address(), me };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let refused = runtime.block_on(connector.search()).err().unwrap();
    assert!(refused.contains("no longer wanted"), "{refused}");
    // A port without a listener.
    let gone = std::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap().local_addr().unwrap();
    let environment = Environment { master: gone.to_string(), ..connector.environment };
    let connector = MasterConnector { environment, ..connector };
    assert!(matches!(runtime.block_on(connector.open()), Err(NotOpened::NoAnswer(_))));
}

#[test]
fn a_trainer_that_ends_without_a_master_ends_the_search() {
    let fixture = Fixture::new(1);
    let control = Control::open(&fixture.environment, Fixture::address()).unwrap();
    fixture.send(0, FromMasterKind::Shutdown(v1::Shutdown { reason: "over".into() }));
    assert!(matches!(control.inbox.recv().unwrap(), FromMaster::Shutdown(_)));
    // A search for another master would find one that refuses the worker, which ends this process.
    fixture.end(0);
    control.close();
}

#[test]
fn over_tls_a_master_is_authenticated_by_ca_and_name_only() {
    let (fixture, ca) = Fixture::over_tls();
    let (_, other) = Fixture::over_tls();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let open = |tls: Option<(&str, &str)>| {
        let tls = tls.map(|(ca, name)| Tls { ca: ca.into(), name: name.into() });
        let environment = Environment { tls, ..fixture.environment.clone() };
        let connector = MasterConnector { environment, address: Fixture::address(), me: None };
        match runtime.block_on(connector.open()) {
            Ok(_) => Ok(()),
            // Another host may answer at this address later: the search continues.
            Err(NotOpened::NoAnswer(why)) => Err(why),
            Err(NotOpened::Refused(why)) => panic!("{why}"),
        }
    };
    assert_eq!(open(Some((&ca, "master"))), Ok(()));
    assert_eq!(fixture.next(), (0, fixture.hello(None)));
    let why = open(Some((&other, "master"))).unwrap_err();
    assert!(
        why.contains("invalid peer certificate") && why.contains(&fixture.environment.master),
        "{why}"
    );
    let why = open(Some((&ca, "cifar-master"))).unwrap_err();
    assert!(why.contains("not valid for name \"cifar-master\""), "{why}");
    assert!(open(None).is_err());
    let without_tls = Fixture::new(usize::MAX);
    let tls = Some(Tls { ca, name: "master".into() });
    let environment = Environment { tls, ..without_tls.environment };
    let connector = MasterConnector { environment, address: Fixture::address(), me: None };
    assert!(matches!(runtime.block_on(connector.open()), Err(NotOpened::NoAnswer(_))));
    // No message has reached another master.
    assert!(fixture.received.try_recv().is_err() && without_tls.received.try_recv().is_err());
}

#[test]
fn an_older_master_than_the_known_one_is_not_accepted_and_the_search_continues() {
    use std::sync::atomic::Ordering::Relaxed;
    let fixture = Fixture::new(usize::MAX);
    let control = Control::open(&fixture.environment, Fixture::address()).unwrap();
    assert!(matches!(fixture.next(), (0, FromWorkerKind::Hello(_))));
    fixture.incarnation.store(1, Relaxed);
    fixture.end(0);
    // The worker reaches the old master repeatedly, and tells it of the newer one.
    for number in 1..=2 {
        match fixture.next() {
            (n, FromWorkerKind::Hello(v1::Hello { resume: Some(resume), .. })) => {
                assert_eq!((n, resume.incarnation), (number, 2));
            }
            other => panic!("{other:?}"),
        }
    }
    assert!(control.inbox.try_recv().is_err(), "it continued with an older master");
    fixture.incarnation.store(3, Relaxed);
    assert_eq!(control.inbox.recv().unwrap(), FromMaster::Reconnected);
    let last = *fixture.streams.lock().unwrap().keys().next_back().unwrap();
    fixture.end(last);
    let newest =
        std::iter::repeat_with(|| fixture.next()).find_map(|(_, received)| match received {
            FromWorkerKind::Hello(hello) => hello.resume.filter(|resume| resume.incarnation > 2),
            _ => None,
        });
    assert_eq!(newest.unwrap().incarnation, 3);
    fixture.streams.lock().unwrap().clear();
    drop(control);
}
