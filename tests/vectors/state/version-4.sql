BEGIN TRANSACTION;
CREATE TABLE certificates (
	serial VARCHAR(64) NOT NULL, 
	digest VARCHAR(64) NOT NULL, 
	uri VARCHAR(255) NOT NULL, 
	issued_at FLOAT NOT NULL, 
	expires_at FLOAT NOT NULL, 
	revoked_at FLOAT, 
	PRIMARY KEY (serial)
);
INSERT INTO "certificates" VALUES('bank-a-1700000000','af8cc3e65a89b4f23babe23cbfac790f3c44bc1d355125c333b81903f189d1c7','spiffe://health-net/silo/bank-a',1700000000.0,1700086400.0,NULL);
INSERT INTO "certificates" VALUES('bank-b-1700000000','7ee62b1209f3cb3b8aea1f9e0817e1f9cd2f8c3494520c91e8f6a757d31d1137','spiffe://health-net/silo/bank-b',1700000000.0,1700086400.0,NULL);
INSERT INTO "certificates" VALUES('clinic-c-1700000000','8d4d5325e304b0f1291ff88f4357d2eb9a450cd1cb837727c276c05a19adfda3','spiffe://health-net/silo/clinic-c',1700000000.0,1700086400.0,NULL);
CREATE TABLE checkpoints (
	"plan" VARCHAR(64) NOT NULL, 
	model VARCHAR(64) NOT NULL, 
	round INTEGER NOT NULL, 
	signature BLOB NOT NULL, 
	made_at FLOAT NOT NULL, 
	PRIMARY KEY ("plan", model), 
	FOREIGN KEY("plan") REFERENCES plans (digest)
);
INSERT INTO "checkpoints" VALUES('29fde71e3ef298312227db745efc78ceb1c4e97c3a45f8e1f3f8680fa8a8f9ac','8e39725a0ee216b69d4612e9c90a6b31af6fe94f5bccdd66069dc836254ca120',0,X'73737373737373737373737373737373737373737373737373737373737373737373737373737373737373737373737373737373737373737373737373737373',1700000000.0);
INSERT INTO "checkpoints" VALUES('29fde71e3ef298312227db745efc78ceb1c4e97c3a45f8e1f3f8680fa8a8f9ac','fdab72c13b5fd5ae900f9bd8894e529fa3622a220646d8c3d197d64f97b7f588',1,X'73737373737373737373737373737373737373737373737373737373737373737373737373737373737373737373737373737373737373737373737373737373',1700000007.0);
CREATE TABLE evaluations (
	"plan" VARCHAR(64) NOT NULL, 
	round INTEGER NOT NULL, 
	silo VARCHAR(63) NOT NULL, 
	attempt INTEGER NOT NULL, 
	model VARCHAR(64) NOT NULL, 
	split VARCHAR(8) NOT NULL, 
	examples INTEGER NOT NULL, 
	exact_matches INTEGER NOT NULL, 
	executed INTEGER NOT NULL, 
	execution_matches INTEGER NOT NULL, 
	loss_per_token FLOAT NOT NULL, 
	seconds FLOAT NOT NULL, 
	reported_at FLOAT NOT NULL, 
	PRIMARY KEY ("plan", round, silo), 
	FOREIGN KEY("plan") REFERENCES plans (digest), 
	FOREIGN KEY(silo) REFERENCES silos (silo)
);
INSERT INTO "evaluations" VALUES('29fde71e3ef298312227db745efc78ceb1c4e97c3a45f8e1f3f8680fa8a8f9ac',1,'bank-a',1,'fdab72c13b5fd5ae900f9bd8894e529fa3622a220646d8c3d197d64f97b7f588','dev',10,4,5,3,1.25,2.0,1700000008.0);
INSERT INTO "evaluations" VALUES('29fde71e3ef298312227db745efc78ceb1c4e97c3a45f8e1f3f8680fa8a8f9ac',1,'bank-b',1,'fdab72c13b5fd5ae900f9bd8894e529fa3622a220646d8c3d197d64f97b7f588','dev',10,10,5,3,1.25,2.0,1700000009.0);
CREATE TABLE held_trust (
	uri VARCHAR(255) NOT NULL, 
	authority VARCHAR(64) NOT NULL, 
	trust VARCHAR(64) NOT NULL, 
	sent_serial VARCHAR(64) NOT NULL, 
	sent_authority VARCHAR(64) NOT NULL, 
	sent_trust VARCHAR(64) NOT NULL, 
	PRIMARY KEY (uri)
);
INSERT INTO "held_trust" VALUES('spiffe://health-net/silo/bank-a','cdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcd','efefefefefefefefefefefefefefefefefefefefefefefefefefefefefefefef','','','');
INSERT INTO "held_trust" VALUES('spiffe://health-net/silo/bank-b','cdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcd','efefefefefefefefefefefefefefefefefefefefefefefefefefefefefefefef','','','');
INSERT INTO "held_trust" VALUES('spiffe://health-net/silo/clinic-c','cdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcd','efefefefefefefefefefefefefefefefefefefefefefefefefefefefefefefef','','','');
CREATE TABLE invitations (
	secret_digest BLOB NOT NULL, 
	silo VARCHAR(63) NOT NULL, 
	expires_at FLOAT NOT NULL, 
	pin VARCHAR(64) NOT NULL, 
	spent_at FLOAT, 
	PRIMARY KEY (secret_digest)
);
INSERT INTO "invitations" VALUES(X'A60A78414B4A65563DA1B4DC2BFA6E968A8993E46BE33D810E43C302596415C5','bank-a',1700000100.0,'a pin',1700000000.0);
INSERT INTO "invitations" VALUES(X'7998FE4DEE531D3424B1F8223F7DBED47E3882A64BD4058055E85949CBE1125F','bank-b',1700000100.0,'a pin',1700000000.0);
INSERT INTO "invitations" VALUES(X'448590A0E02530505CA5A66AD0D6CDDA6D74455275AB712849DABF35E792E491','clinic-c',1700000100.0,'a pin',1700000000.0);
INSERT INTO "invitations" VALUES(X'CEE450A2406289497E67BCD0CC5503C073A6F15504E5C6993AB085F4D4E09462','clinic-c',1700000100.0,'a pin',NULL);
CREATE TABLE ledger_heads (
	silo VARCHAR(63) NOT NULL, 
	sequence BIGINT NOT NULL, 
	digest VARCHAR(64) NOT NULL, 
	shown_at FLOAT NOT NULL, 
	PRIMARY KEY (silo)
);
INSERT INTO "ledger_heads" VALUES('bank-a',3,'abababababababababababababababababababababababababababababababab',1700000003.0);
CREATE TABLE machine (
	id INTEGER NOT NULL, 
	version INTEGER NOT NULL, 
	phase VARCHAR(32) NOT NULL, 
	state TEXT NOT NULL, 
	PRIMARY KEY (id)
);
INSERT INTO "machine" VALUES(1,3,'finished','{"course":{"terms":{"federation":"health-net","plan":"29fde71e3ef298312227db745efc78ceb1c4e97c3a45f8e1f3f8680fa8a8f9ac","name":"first","rounds":1,"min_silos":2,"start_when_ready":false,"gathering_deadline_s":60.0,"training_deadline_s":600.0,"evaluation_deadline_s":120.0,"evaluate_every":1,"evaluate_initial":false,"evaluate_last":true,"secure_aggregation":false,"masking_deadline_s":0.0,"record_level":false,"silo_level":false},"population":["bank-b","bank-a"],"ready":["bank-b","bank-a"],"model":"fdab72c13b5fd5ae900f9bd8894e529fa3622a220646d8c3d197d64f97b7f588","model_round":1,"best":{"model":"fdab72c13b5fd5ae900f9bd8894e529fa3622a220646d8c3d197d64f97b7f588","round":1,"exact_matches":14,"examples":20},"included":[{"silo":"bank-a","digest":"e42dbcb9dcf0a5451d06fdf9f9cf3fefa87f5da961919ab504e6c8c78e37cb74"},{"silo":"bank-b","digest":"73c1a615836f213933f3356448b74ca4ffac75c2372f801e7446804dc7299041"}],"barred":[],"disputes":[],"paused":false},"reason":""}');
CREATE TABLE plans (
	digest VARCHAR(64) NOT NULL, 
	name VARCHAR(63) NOT NULL, 
	begun_at FLOAT NOT NULL, 
	PRIMARY KEY (digest)
);
INSERT INTO "plans" VALUES('29fde71e3ef298312227db745efc78ceb1c4e97c3a45f8e1f3f8680fa8a8f9ac','first',1700000000.0);
CREATE TABLE rounds (
	"plan" VARCHAR(64) NOT NULL, 
	round INTEGER NOT NULL, 
	attempt INTEGER NOT NULL, 
	outcome VARCHAR(16) NOT NULL, 
	detail TEXT NOT NULL, 
	opened_at FLOAT NOT NULL, 
	closed_at FLOAT, 
	model VARCHAR(64) NOT NULL, 
	weight_fallback BOOLEAN NOT NULL, 
	weight_sum FLOAT, 
	saturated INTEGER, 
	coordinates INTEGER, 
	macro_exact_match FLOAT, 
	micro_exact_match FLOAT, 
	PRIMARY KEY ("plan", round, attempt), 
	FOREIGN KEY("plan") REFERENCES plans (digest)
);
INSERT INTO "rounds" VALUES('29fde71e3ef298312227db745efc78ceb1c4e97c3a45f8e1f3f8680fa8a8f9ac',1,1,'applied','',1700000001.0,1700000007.0,'fdab72c13b5fd5ae900f9bd8894e529fa3622a220646d8c3d197d64f97b7f588',0,NULL,NULL,NULL,0.7,0.7);
CREATE TABLE schema (
	version INTEGER NOT NULL, 
	PRIMARY KEY (version)
);
INSERT INTO "schema" VALUES(4);
CREATE TABLE silos (
	silo VARCHAR(63) NOT NULL, 
	identity_public_key BLOB NOT NULL, 
	certificate_serial VARCHAR(64) NOT NULL, 
	certificate_digest VARCHAR(64) NOT NULL, 
	certificate_expires FLOAT NOT NULL, 
	enrolled_at FLOAT NOT NULL, 
	last_seen FLOAT NOT NULL, 
	revoked_at FLOAT, 
	PRIMARY KEY (silo)
);
INSERT INTO "silos" VALUES('bank-a',X'20C72791FEC65106BA85FBDA8730418D77EC1A8468F254BF96D4D58956137F60','bank-a-1700000000','af8cc3e65a89b4f23babe23cbfac790f3c44bc1d355125c333b81903f189d1c7',1700086400.0,1700000000.0,1700000050.0,NULL);
INSERT INTO "silos" VALUES('bank-b',X'62616E6B2D622E2E2E2E2E2E2E2E2E2E2E2E2E2E2E2E2E2E2E2E2E2E2E2E2E2E','bank-b-1700000000','7ee62b1209f3cb3b8aea1f9e0817e1f9cd2f8c3494520c91e8f6a757d31d1137',1700086400.0,1700000000.0,0.0,NULL);
INSERT INTO "silos" VALUES('clinic-c',X'636C696E69632D632E2E2E2E2E2E2E2E2E2E2E2E2E2E2E2E2E2E2E2E2E2E2E2E','clinic-c-1700000000','8d4d5325e304b0f1291ff88f4357d2eb9a450cd1cb837727c276c05a19adfda3',1700086400.0,1700000000.0,0.0,NULL);
CREATE TABLE successions (
	silo VARCHAR(63) NOT NULL, 
	predecessor BLOB NOT NULL, 
	successor BLOB NOT NULL, 
	statement BLOB NOT NULL, 
	succeeded_at FLOAT NOT NULL, 
	PRIMARY KEY (silo, predecessor)
);
INSERT INTO "successions" VALUES('bank-a',X'300E316FA220E5F9DC5A7D5A14AE14E084A9177344EC853278C5F09F80C3ED36',X'20C72791FEC65106BA85FBDA8730418D77EC1A8468F254BF96D4D58956137F60',X'73737373737373737373737373737373737373737373737373737373737373737373737373737373737373737373737373737373737373737373737373737373',1700000060.0);
CREATE TABLE updates (
	"plan" VARCHAR(64) NOT NULL, 
	round INTEGER NOT NULL, 
	attempt INTEGER NOT NULL, 
	silo VARCHAR(63) NOT NULL, 
	outcome VARCHAR(16) NOT NULL, 
	detail TEXT NOT NULL, 
	update_digest VARCHAR(64), 
	signature BLOB, 
	examples INTEGER NOT NULL, 
	loss_max FLOAT NOT NULL, 
	loss_min FLOAT NOT NULL, 
	loss_first FLOAT NOT NULL, 
	loss_last FLOAT NOT NULL, 
	optimizer_steps INTEGER NOT NULL, 
	seconds FLOAT NOT NULL, 
	delta_norm FLOAT NOT NULL, 
	weight FLOAT NOT NULL, 
	share FLOAT NOT NULL, 
	capped BOOLEAN NOT NULL, 
	committed_at FLOAT, 
	PRIMARY KEY ("plan", round, attempt, silo), 
	FOREIGN KEY("plan", round, attempt) REFERENCES rounds ("plan", round, attempt), 
	FOREIGN KEY(silo) REFERENCES silos (silo)
);
INSERT INTO "updates" VALUES('29fde71e3ef298312227db745efc78ceb1c4e97c3a45f8e1f3f8680fa8a8f9ac',1,1,'bank-a','committed','','e42dbcb9dcf0a5451d06fdf9f9cf3fefa87f5da961919ab504e6c8c78e37cb74',X'73737373737373737373737373737373737373737373737373737373737373737373737373737373737373737373737373737373737373737373737373737373',30,3.0,1.0,3.0,1.0,5,1.5,0.5,20.0,0.5,0,1700000005.0);
INSERT INTO "updates" VALUES('29fde71e3ef298312227db745efc78ceb1c4e97c3a45f8e1f3f8680fa8a8f9ac',1,1,'bank-b','committed','','73c1a615836f213933f3356448b74ca4ffac75c2372f801e7446804dc7299041',X'73737373737373737373737373737373737373737373737373737373737373737373737373737373737373737373737373737373737373737373737373737373',10,3.0,1.0,3.0,1.0,5,1.5,0.5,20.0,0.5,0,1700000006.0);
CREATE INDEX ix_certificates_uri ON certificates (uri);
CREATE INDEX ix_invitations_silo ON invitations (silo);
COMMIT;
