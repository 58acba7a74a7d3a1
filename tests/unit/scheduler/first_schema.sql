-- A database as it was before there were migrations, written by that version itself.
BEGIN TRANSACTION;
CREATE TABLE api_keys (
	name VARCHAR(200) NOT NULL, 
	owner VARCHAR(200) NOT NULL, 
	digest VARCHAR(64) NOT NULL, 
	PRIMARY KEY (name)
);
INSERT INTO "api_keys" VALUES('embedded','admin','dddddddddddddddddddddddddddddddddddddddddddddddddddddddddddddddd');
CREATE TABLE events (
	"row" INTEGER NOT NULL, 
	job_id VARCHAR(64) NOT NULL, 
	at FLOAT NOT NULL, 
	kind VARCHAR(64) NOT NULL, 
	detail TEXT NOT NULL, 
	PRIMARY KEY ("row"), 
	FOREIGN KEY(job_id) REFERENCES jobs (id)
);
INSERT INTO "events" VALUES(1,'job-1',1.5,'submitted','');
INSERT INTO "events" VALUES(2,'job-1',2.5,'running','x');
CREATE TABLE jobs (
	"row" INTEGER NOT NULL, 
	id VARCHAR(64) NOT NULL, 
	owner VARCHAR(200) NOT NULL, 
	name VARCHAR(200) NOT NULL, 
	kind VARCHAR(32) NOT NULL, 
	state VARCHAR(16) NOT NULL, 
	config JSON NOT NULL, 
	run_dir TEXT NOT NULL, 
	gpus INTEGER NOT NULL, 
	cpu_slots INTEGER NOT NULL, 
	created_at FLOAT NOT NULL, 
	started_at FLOAT, 
	ended_at FLOAT, 
	cause TEXT NOT NULL, 
	lease_expires_at FLOAT, 
	idempotency_key VARCHAR(200), 
	code_sha256 VARCHAR(64), 
	PRIMARY KEY ("row"), 
	UNIQUE (owner, idempotency_key), 
	UNIQUE (id)
);
INSERT INTO "jobs" VALUES(1,'job-1','admin','it''s; DROP TABLE jobs;--','rl','RUNNING','{"kind": "rl", "a": [1, null]}','/runs/job-1',1,0,1.5,2.5,NULL,'',NULL,'k','ab');
INSERT INTO "jobs" VALUES(2,'job-2','admin','job-2','interactive','QUEUED','{"kind": "interactive", "base_model": "m"}','/runs/job-2',0,1,3.5,NULL,NULL,'',33.5,NULL,NULL);
CREATE TABLE policies (
	id VARCHAR(64) NOT NULL, 
	job_id VARCHAR(64) NOT NULL, 
	server_id VARCHAR(64) NOT NULL, 
	PRIMARY KEY (id), 
	FOREIGN KEY(job_id) REFERENCES jobs (id), 
	FOREIGN KEY(server_id) REFERENCES servers (id)
);
INSERT INTO "policies" VALUES('pol-1','job-1','srv-1');
CREATE TABLE servers (
	id VARCHAR(64) NOT NULL, 
	state VARCHAR(16) NOT NULL, 
	base_model TEXT NOT NULL, 
	node_id VARCHAR(128) NOT NULL, 
	gpus INTEGER NOT NULL, 
	cpu_slots INTEGER NOT NULL, 
	endpoint TEXT NOT NULL, 
	worker_pid INTEGER, 
	front_pid INTEGER, 
	PRIMARY KEY (id)
);
INSERT INTO "servers" VALUES('srv-1','READY','m','node',1,0,'http://127.0.0.1:1',11,12);
CREATE INDEX ix_jobs_state ON jobs (state);
CREATE INDEX ix_jobs_owner ON jobs (owner);
CREATE INDEX ix_servers_state ON servers (state);
CREATE INDEX ix_policies_job_id ON policies (job_id);
CREATE INDEX ix_policies_server_id ON policies (server_id);
CREATE INDEX ix_events_job_id ON events (job_id);
COMMIT;
