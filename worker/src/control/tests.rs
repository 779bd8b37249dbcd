//! The control stream against a master that is only a server.

use std::collections::BTreeMap;
use std::net::Ipv4Addr;
use std::sync::Mutex;

use elasticdl_proto::v1::master_server::{Master, MasterServer};
use tokio_stream::wrappers::TcpListenerStream;
use tonic::{Response, Status};
use v1::master_message::Kind as Told;
use v1::worker_message::Kind as Said;

use super::*;
use crate::environment::Tls;

type Outgoing = mpsc::UnboundedSender<Result<v1::MasterMessage, Status>>;

/// Streams of workers, by number: what they say comes out, the test says the rest.
struct Desk {
    said: Sender<(usize, Said)>,
    streams: Arc<Mutex<BTreeMap<usize, Outgoing>>>,
    /// From this one on, streams are refused.
    refuse_from: usize,
    count: std::sync::atomic::AtomicUsize,
    /// Which master it is.
    incarnation: Arc<std::sync::atomic::AtomicU64>,
}

#[tonic::async_trait]
impl Master for Desk {
    type JoinStream = UnboundedReceiverStream<Result<v1::MasterMessage, Status>>;

    async fn join(
        &self,
        request: Request<Streaming<v1::WorkerMessage>>,
    ) -> Result<Response<Self::JoinStream>, Status> {
        let number = self.count.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        if number >= self.refuse_from {
            return Err(Status::failed_precondition("not wanted any more"));
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
        outgoing.send(Ok(v1::MasterMessage { kind: Some(Told::Welcome(welcome)) })).unwrap();
        self.streams.lock().unwrap().insert(number, outgoing);
        let (said, mut stream) = (self.said.clone(), request.into_inner());
        tokio::spawn(async move {
            while let Ok(Some(v1::WorkerMessage { kind: Some(kind) })) = stream.message().await {
                if !matches!(kind, Said::Heartbeat(_)) && said.send((number, kind)).is_err() {
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
        Err(Status::unimplemented("nobody asks"))
    }

    async fn checkpoint(
        &self,
        _: Request<v1::CheckpointRequest>,
    ) -> Result<Response<v1::CheckpointReply>, Status> {
        Err(Status::unimplemented("nobody asks"))
    }

    async fn scale(
        &self,
        _: Request<v1::ScaleRequest>,
    ) -> Result<Response<v1::ScaleReply>, Status> {
        Err(Status::unimplemented("nobody asks"))
    }
}

struct Stage {
    environment: Environment,
    said: std::sync::mpsc::Receiver<(usize, Said)>,
    streams: Arc<Mutex<BTreeMap<usize, Outgoing>>>,
    incarnation: Arc<std::sync::atomic::AtomicU64>,
}

impl Stage {
    fn new(refuse_from: usize) -> Self {
        Self::with(refuse_from, tonic::transport::Server::builder())
    }

    /// One that is known by the returned certificate, under the name `master`.
    fn over_tls() -> (Self, String) {
        let key = rcgen::KeyPair::generate().unwrap();
        let shown = rcgen::CertificateParams::new(["master".into()])
            .unwrap()
            .self_signed(&key)
            .unwrap()
            .pem();
        let identity = tonic::transport::Identity::from_pem(&shown, key.serialize_pem());
        let config = tonic::transport::ServerTlsConfig::new().identity(identity);
        (
            Self::with(usize::MAX, tonic::transport::Server::builder().tls_config(config).unwrap()),
            shown,
        )
    }

    fn with(refuse_from: usize, mut server: tonic::transport::Server) -> Self {
        let (tell, said) = channel();
        let streams = Arc::default();
        let count = std::sync::atomic::AtomicUsize::default();
        let incarnation = Arc::new(2.into());
        let desk = Desk {
            said: tell,
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
                    .add_service(MasterServer::new(desk))
                    .serve_with_incoming(incoming)
                    .await
                    .unwrap();
            });
        });
        Self { environment, said, streams, incarnation }
    }

    fn address() -> SocketAddr {
        (Ipv4Addr::LOCALHOST, 9).into()
    }

    fn hello(&self, resume: Option<v1::Resume>) -> Said {
        let (job, address) = ("job".into(), Self::address().to_string());
        Said::Hello(v1::Hello { job, launch: 3, address, pid: std::process::id(), resume })
    }

    fn next(&self) -> (usize, Said) {
        self.said.recv_timeout(Duration::from_secs(60)).unwrap()
    }

    fn tell(&self, number: usize, told: Told) {
        self.streams.lock().unwrap()[&number]
            .send(Ok(v1::MasterMessage { kind: Some(told) }))
            .unwrap();
    }

    fn end(&self, number: usize) {
        self.streams.lock().unwrap().remove(&number).unwrap();
    }
}

fn heard(generation: u64) -> v1::Membership {
    let member = v1::Member { worker: 7, address: "127.0.0.1:9".into() };
    v1::Membership { generation, members: vec![member], abort: false }
}

fn asks(epoch: u32) -> ToMaster {
    ToMaster::Report(Report::LeaseRequest { epoch, records: 2 })
}

#[test]
fn another_master_hears_who_this_is_and_nothing_that_was_meant_for_the_one_before() {
    let stage = Stage::new(usize::MAX);
    let control = Control::open(&stage.environment, Stage::address()).unwrap();
    assert_eq!(stage.next(), (0, stage.hello(None)));
    control.outbox.send(ToMaster::Ready { parameters: 5 });
    assert_eq!(stage.next(), (0, Said::Ready(v1::Ready { parameters: 5 })));
    stage.tell(0, Told::Membership(heard(3)));
    stage.tell(0, Told::Membership(heard(4)));
    // A late one of an older generation is no news.
    stage.tell(0, Told::Membership(heard(2)));
    assert!(matches!(control.inbox.recv().unwrap(), FromMaster::Membership(..)));
    assert!(matches!(control.inbox.recv().unwrap(), FromMaster::Membership(..)));
    assert!(matches!(control.inbox.recv().unwrap(), FromMaster::Membership(..)));
    stage.end(0);
    assert_eq!(control.inbox.recv().unwrap(), FromMaster::Reconnected);
    let resume =
        v1::Resume { worker: 7, membership: Some(heard(4)), parameters: Some(5), incarnation: 2 };
    assert_eq!(stage.next(), (1, stage.hello(Some(resume))));
    // The trainer has not looked into its inbox yet.
    control.outbox.send(asks(0));
    control.outbox.send(ToMaster::Report(Report::HeldLeases { step: 6, ranges: Vec::new() }));
    control.outbox.send(asks(1));
    assert_eq!(stage.next(), (1, Said::Holding(v1::Holding { step: 6, ranges: Vec::new() })));
    assert_eq!(stage.next(), (1, Said::LeaseRequest(v1::LeaseRequest { epoch: 1, records: 2 })));
    stage.streams.lock().unwrap().clear();
    control.close();
}

#[test]
fn a_master_that_does_not_want_this_worker_ends_its_search_and_one_that_is_silent_does_not() {
    let stage = Stage::new(0);
    let me = Some(v1::Resume {
        worker: 7,
        membership: Some(heard(4)),
        parameters: Some(5),
        incarnation: 2,
    });
    let connector =
        MasterConnector { environment: stage.environment, address: Stage::address(), me };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let refused = runtime.block_on(connector.search()).err().unwrap();
    assert!(refused.contains("not wanted any more"), "{refused}");
    // A port on which nobody listens any more.
    let gone = std::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap().local_addr().unwrap();
    let environment = Environment { master: gone.to_string(), ..connector.environment };
    let connector = MasterConnector { environment, ..connector };
    assert!(matches!(runtime.block_on(connector.open()), Err(NotOpened::NoAnswer(_))));
}

#[test]
fn a_trainer_that_ends_without_a_master_ends_the_search() {
    let stage = Stage::new(1);
    let control = Control::open(&stage.environment, Stage::address()).unwrap();
    stage.tell(0, Told::Shutdown(v1::Shutdown { reason: "over".into() }));
    assert!(matches!(control.inbox.recv().unwrap(), FromMaster::Shutdown(_)));
    // Were it to look for another master now, it would find one that ends this process.
    stage.end(0);
    control.close();
}

#[test]
fn over_tls_a_master_is_known_by_ca_and_name_and_by_nothing_else() {
    let (stage, ca) = Stage::over_tls();
    let (_, other) = Stage::over_tls();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let open = |tls: Option<(&str, &str)>| {
        let tls = tls.map(|(ca, name)| Tls { ca: ca.into(), name: name.into() });
        let environment = Environment { tls, ..stage.environment.clone() };
        let connector = MasterConnector { environment, address: Stage::address(), me: None };
        match runtime.block_on(connector.open()) {
            Ok(_) => Ok(()),
            // It may be another one's turn to answer at this address: the search goes on.
            Err(NotOpened::NoAnswer(why)) => Err(why),
            Err(NotOpened::Refused(why)) => panic!("{why}"),
        }
    };
    assert_eq!(open(Some((&ca, "master"))), Ok(()));
    assert_eq!(stage.next(), (0, stage.hello(None)));
    let why = open(Some((&other, "master"))).unwrap_err();
    assert!(
        why.contains("invalid peer certificate") && why.contains(&stage.environment.master),
        "{why}"
    );
    let why = open(Some((&ca, "cifar-master"))).unwrap_err();
    assert!(why.contains("not valid for name \"cifar-master\""), "{why}");
    assert!(open(None).is_err());
    let in_the_open = Stage::new(usize::MAX);
    let tls = Some(Tls { ca, name: "master".into() });
    let environment = Environment { tls, ..in_the_open.environment };
    let connector = MasterConnector { environment, address: Stage::address(), me: None };
    assert!(matches!(runtime.block_on(connector.open()), Err(NotOpened::NoAnswer(_))));
    // Nobody else has heard a word.
    assert!(stage.said.try_recv().is_err() && in_the_open.said.try_recv().is_err());
}

#[test]
fn an_older_master_than_the_one_known_is_not_accepted_and_the_search_goes_on() {
    use std::sync::atomic::Ordering::Relaxed;
    let stage = Stage::new(usize::MAX);
    let control = Control::open(&stage.environment, Stage::address()).unwrap();
    assert!(matches!(stage.next(), (0, Said::Hello(_))));
    stage.incarnation.store(1, Relaxed);
    stage.end(0);
    // It comes to the old one again and again, and tells it who else there is.
    for number in 1..=2 {
        match stage.next() {
            (n, Said::Hello(v1::Hello { resume: Some(resume), .. })) => {
                assert_eq!((n, resume.incarnation), (number, 2));
            }
            other => panic!("{other:?}"),
        }
    }
    assert!(control.inbox.try_recv().is_err(), "it went on with an older master");
    stage.incarnation.store(3, Relaxed);
    assert_eq!(control.inbox.recv().unwrap(), FromMaster::Reconnected);
    let last = *stage.streams.lock().unwrap().keys().next_back().unwrap();
    stage.end(last);
    let newest = std::iter::repeat_with(|| stage.next()).find_map(|(_, said)| match said {
        Said::Hello(hello) => hello.resume.filter(|resume| resume.incarnation > 2),
        _ => None,
    });
    assert_eq!(newest.unwrap().incarnation, 3);
    stage.streams.lock().unwrap().clear();
    drop(control);
}
